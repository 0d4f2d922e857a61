"""The program of a worker process: judges one item a line. See workers.py, which starts it.

    python -P judge.py <math|reasoning_gym> <seconds>

It reads JSON objects, one a line, and answers each with one line, {"score": number} or {"problem": name}. Nothing of this
project is imported, so that it starts as fast as the library that judges.
"""

import ast
import json
import os
import re
import resource
import signal
import sys
from functools import lru_cache

MEMORY_BYTES = 4 * 2**30  # address space; some expressions would take all memory there is
GRACE_SECONDS = 5  # the process that started this one ends it after <seconds>; if that one is gone, it ends itself


def math_judge():
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    extraction = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    def judge(item):
        # The library's own time-outs are signals, which it swallows at times; here the process itself is ended instead.
        answer = parse(item["answer"], extraction_config=extraction, parsing_timeout=None)
        if not answer:
            return {"problem": "unreadable_answers"}
        found = parse(item["completion"], extraction_config=extraction, parsing_timeout=None)
        return {"score": float(verify(answer, found, timeout_seconds=None))}

    return judge


GYM_SIZE = 20_000  # as in dataset/tasks/gym_questions.py
# What an answer that reasoning-gym hands to sympy's parse_expr (which runs it as Python) may consist of.
_NAMES = set("sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt Abs Integral pi".split())
_SYMBOLIC = {"simple_integration", "intermediate_integration", "polynomial_multiplication", "puzzle24", "countdown"}
# Modules of reasoning-gym that call eval on an answer, which should be a list.
_LISTS = ("algorithmic.string_insertion", "algorithmic.spiral_matrix", "algorithmic.binary_matrix", "games.n_queens")


def reasoning_gym_judge():
    import importlib

    import reasoning_gym

    for name in _LISTS:
        # The name found first in a module is its own: there, eval now reads literals and runs nothing.
        importlib.import_module(f"reasoning_gym.{name}").eval = ast.literal_eval

    @lru_cache(maxsize=8)
    def dataset(name, seed, options):
        return reasoning_gym.create_dataset(name, seed=seed, size=GYM_SIZE, **json.loads(options))

    @lru_cache(maxsize=64)
    def entry(name, seed, options, index):
        block, place = divmod(index, GYM_SIZE)
        return dataset(name, seed + block * GYM_SIZE, options)[place]  # the question as it was asked

    def judge(item):
        name, answer = item["dataset"], item["completion"]
        if name in _SYMBOLIC and not is_plain_expression(answer):
            return {"score": 0.0}
        which = name, item["seed"], json.dumps(item["options"], sort_keys=True)
        return {"score": float(dataset(*which).score_answer(answer, entry=entry(*which, item["index"])))}

    return judge


def is_plain_expression(text):
    """Whether a text has only numbers, operators, single letters and known names: nothing that Python could be made to call."""
    if not re.fullmatch(r"[\w\s+\-*/^().,]*", text, re.ASCII) or re.search(r"\.\s*[A-Za-z_(]|[A-Za-z_)]\s*\.", text):
        return False
    return all(len(name) == 1 or name in _NAMES for name in re.findall(r"[A-Za-z_]\w*", text))


JUDGES = {"math": math_judge, "reasoning_gym": reasoning_gym_judge}


def main():
    kind, seconds = sys.argv[1], float(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all; what it means is up to the parent
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints is no answer
    judge = JUDGES[kind]()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        # Nobody handles this alarm, so the kernel ends the process whatever it is doing.
        signal.setitimer(signal.ITIMER_REAL, seconds + GRACE_SECONDS)
        try:
            answer = judge(json.loads(line))
        except Exception as error:  # of the library, on a text that nobody foresaw: this item is not judged, the next one is
            answer = {"problem": "errors", "error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
