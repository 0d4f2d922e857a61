"""The program that makes questions with reasoning-gym: one JSON line [question, answer] for each, without end.

    PYTHONHASHSEED=0 python -P gym_questions.py <data set> <seed> <options as JSON>

Some of its data sets depend on the order of Python's sets, which a process has at random unless PYTHONHASHSEED says otherwise;
so questions are made, and judged, in processes of their own. What cannot be is one line {"error": ..., "names": [...]}.
"""

import json
import os
import sys

SIZE = 20_000  # of each data set of the package, some of which are bounded; the next one continues its seeds


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the package prints is no question
    from reasoning_gym import factory

    name, seed, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    if name not in factory.DATASETS:
        print(json.dumps({"error": "unknown", "names": sorted(factory.DATASETS)}), file=answers, flush=True)
        return
    while True:
        try:
            made = factory.create_dataset(name, seed=seed, size=SIZE, **options)
        except (TypeError, ValueError, AssertionError) as error:
            print(json.dumps({"error": str(error), "names": []}), file=answers, flush=True)
            return
        for index in range(SIZE):
            entry = made[index]
            answer = "" if entry["answer"] is None else str(entry["answer"])
            print(json.dumps([entry["question"], answer]), file=answers, flush=True)
        seed += SIZE


if __name__ == "__main__":
    main()
