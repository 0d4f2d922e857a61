"""One answer to each prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from twinkle_research.data_format import SampledSequence, SampleResponse, SamplingParams, Trajectory
from twinkle_research.rollout.base import Clock, Played, Rollout
from twinkle_research.rollout.batch import Completion

if TYPE_CHECKING:
    from twinkle_research.dataset.prompts import PromptDataset
    from twinkle_research.distributed.runtime import Runtime
    from twinkle_research.reward import Scorer
    from twinkle_research.sampler.base import Sampler


class SingleTurnRollout(Rollout):
    """Prompts are dealt to the ranks in turns; each scores what it has sampled; all get everything, as token ids."""

    def __init__(self, sampler: Sampler, scorer: Scorer, runtime: Runtime, clock: Clock) -> None:
        self.sampler = sampler
        self.scorer = scorer
        self.runtime = runtime
        self.clock = clock

    def __call__(
        self, prompts: PromptDataset, rows: Sequence[int], params: SamplingParams, *, step: int, purpose: str, first: int = 0
    ) -> Played:
        rank, size = self.sampler.data_parallel
        own = range(rank, len(rows), size)
        with self.clock.part("sample"):
            numbers = [first + i for i in own]
            responses = self.sampler.sample(
                [prompts[rows[i]] for i in own], params, step=step, prompt_indices=numbers, purpose=purpose
            )
        with self.clock.part("reward"):
            scored = self._score([prompts.trajectory(rows[i]) for i in own], numbers, responses, params)
            shares = dict(self.runtime.gather_objects((rank, scored)))  # ranks of one share have sampled the same
        completions = [c for share in shares.values() for c in share.completions]
        counts = Counter()
        for share in shares.values():
            counts.update(share.counts)
        return Played(sorted(completions, key=lambda c: (c.prompt, c.k)), dict(counts))

    def _score(
        self, asked: list[Trajectory], numbers: list[int], responses: list[SampleResponse], params: SamplingParams
    ) -> Played:
        sampled = [(i, k, s) for i, response in enumerate(responses) for k, s in enumerate(response.sequences)]
        result = self.scorer.score([_answered(asked[i], sequence) for i, _, sequence in sampled])
        completions = []
        for n, (i, k, sequence) in enumerate(sampled):
            completion = _completion(asked[i], numbers[i], k, sequence, params)
            completion.reward = result.totals[n]
            completion.rewards = {name: values[n] for name, values in result.parts.items()}
            completions.append(completion)
        return Played(completions, {name: n for name, n in result.counts.items() if name != "unscored"})


def _answered(asked: Trajectory, sequence: SampledSequence) -> Trajectory:
    """The conversation with its answer, as rewards see it."""
    return {
        **asked,
        "messages": [*asked["messages"], {"role": "assistant", "content": sequence.decoded}],
        "completion": sequence.decoded,
        "stop_reason": sequence.stop_reason,
        "num_tokens": len(sequence.tokens),
    }


def _completion(asked: Trajectory, number: int, k: int, sequence: SampledSequence, params: SamplingParams) -> Completion:
    feature = {**sequence.new_input_feature, "row": f"{asked['row']}, completion {k}"}
    if params.temperature not in (0.0, 1.0):
        feature["temperature"] = params.temperature
    if sequence.kept is not None:
        feature["kept_ids"] = sequence.kept
    answer = dict(asked["user_data"]).get("answer")
    return Completion(
        prompt=number,
        k=k,
        feature=feature,
        logprobs=[entries[0][1] for entries in sequence.logprobs],
        text=sequence.decoded,
        stop_reason=sequence.stop_reason,
        prompt_text=str(asked["messages"][-1]["content"]),
        answer=None if answer is None else str(answer),
    )
