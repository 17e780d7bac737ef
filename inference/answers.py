"""From what the engine gave to the `text_completion` object, shaped as vLLM's own server shapes it.

Everything here is plain Python on `EngineDelta`s. What leaves is JSON bytes that the API passes on unread. Nothing
that is not a finite number reaches them: minus infinity becomes -9999.0, as in vLLM, and anything else raises
`MisbehavedEngine`.
"""

import math
from collections.abc import Callable, Sequence

import msgspec

from inference.wire import CompletionWork, EngineDelta, EngineRequest, PositionLogprobs

# What OpenAI's and vLLM's servers write for a probability of zero.
LOGPROB_OF_ZERO = -9999.0

_json = msgspec.json.Encoder()


class MisbehavedEngine(Exception):
    """The engine gave something that must never be passed on as an answer."""


class Logprobs(msgspec.Struct, frozen=True):
    """A choice's `logprobs`: four lists of one entry a token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, frozen=True):
    """One candidate at one position of `prompt_logprobs`."""

    logprob: float
    rank: int
    decoded_token: str


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One of the prompts * n texts of an answer. `token_ids` and `prompt_token_ids` are null unless asked for."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: Sequence[int] | None
    prompt_logprobs: msgspec.Raw | None
    prompt_token_ids: Sequence[int] | None


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What one choice gained, in a chunk of a stream."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_token_ids: Sequence[int] | None
    token_ids: Sequence[int] | None


class Usage(msgspec.Struct, frozen=True):
    """The tokens of an answer, as the engine counted them."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The `text_completion` object; `activations` are spliced in as bytes beside `choices`."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    service_tier: None = None
    system_fingerprint: None = None
    usage: Usage


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk of a stream; `usage` only on the last one, where `choices` is empty."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | msgspec.UnsetType = msgspec.UNSET


def engine_requests(work: CompletionWork) -> list[EngineRequest]:
    """The engine's requests for `work`, one a prompt, in order."""
    return [
        EngineRequest(
            request_id=f"{work.request_id}-{index}",
            prompt_token_ids=prompt,
            sampling=work.sampling,
            capture_layers=work.capture_layers,
            steering=work.steering,
        )
        for index, prompt in enumerate(work.prompts)
    ]


def finite_logprob(logprob: float) -> float:
    """`logprob` as JSON may hold it; raises MisbehavedEngine for NaN and plus infinity."""
    if math.isfinite(logprob):
        return max(logprob, LOGPROB_OF_ZERO)
    if logprob == -math.inf:
        return LOGPROB_OF_ZERO
    raise MisbehavedEngine("The engine gave a log probability that is not a number.")


class _Shaper:
    """What answers and streams share: ids, counts, echo and logprobs."""

    def __init__(self, work: CompletionWork, decode: Callable[[Sequence[int]], str]) -> None:
        self.work = work
        self._decode = decode
        self._prompt_logprobs: dict[int, tuple[PositionLogprobs | None, ...]] = {}
        self._begun: set[int] = set()
        self.completion_tokens = 0

    @property
    def counted(self) -> tuple[int, int]:
        """What is charged if it ends now: the tokens of the prompts that went through the model, and those it made."""
        return sum(len(self.work.prompts[prompt]) for prompt in self._begun), self.completion_tokens

    @property
    def id(self) -> str:
        """The answer's `id`."""
        return f"cmpl-{self.work.request_id.removeprefix('req_')}"

    @property
    def usage(self) -> Usage:
        """The tokens of the answer. A prompt counts once, however large `n` is."""
        prompt_tokens = self.work.prompt_tokens
        return Usage(prompt_tokens, prompt_tokens + self.completion_tokens, self.completion_tokens)

    def _count(self, prompt: int, delta: EngineDelta) -> None:
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = delta.prompt_logprobs
        self._begun.add(prompt)
        self.completion_tokens += len(delta.token_ids)

    def _echoed_text(self, prompt: int) -> str:
        # With return_token_ids vLLM's server gives the prompt as ids instead of as text.
        if self.work.return_token_ids:
            return ""
        given = self.work.prompt_texts[prompt]
        return self._decode(self.work.prompts[prompt]) if given is None else given

    def _echoed_logprobs(self, prompt: int) -> tuple[PositionLogprobs | None, ...]:
        if prompt not in self._prompt_logprobs:
            raise MisbehavedEngine("The engine gave no log probabilities of the prompt.")
        return self._prompt_logprobs[prompt]

    def _logprobs(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None], first_offset: int
    ) -> Logprobs:
        """The `logprobs` of `token_ids`, whose candidates are `positions` (None: nothing came before the token).

        A position's top holds the token that stands there and `logprobs` more; with `logprob_token_ids`, all that the
        engine gave. Candidates whose texts are the same share an entry: the shape's keys are texts.
        """
        if len(token_ids) != len(positions):
            raise MisbehavedEngine(f"The engine gave {len(positions)} log probabilities for {len(token_ids)} tokens.")
        sampling = self.work.sampling
        at_most = None if sampling.logprob_token_ids or sampling.logprobs is None else sampling.logprobs + 1
        shaped = Logprobs([], [], [], [])
        offset = first_offset
        for token_id, position in zip(token_ids, positions, strict=True):
            if position is None:
                token = self._decode([token_id])
                shaped.token_logprobs.append(None)
                shaped.top_logprobs.append(None)
            else:
                standing = position[0]
                if standing.token_id != token_id:
                    raise MisbehavedEngine("The engine gave the log probabilities of another token.")
                token = standing.token
                shaped.token_logprobs.append(finite_logprob(standing.logprob))
                shaped.top_logprobs.append({one.token: finite_logprob(one.logprob) for one in position[:at_most]})
            shaped.tokens.append(token)
            shaped.text_offset.append(offset)
            offset += len(token)
        return shaped


class _Sequence:
    """What one choice has gained until now."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs | None] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None


class AnswerBuilder(_Shaper):
    """Gathers the deltas of every prompt and sequence, and makes the whole answer of them.

    `decode` turns token ids into text, special tokens included.
    """

    def __init__(self, work: CompletionWork, decode: Callable[[Sequence[int]], str]) -> None:
        super().__init__(work, decode)
        self._sequences = [[_Sequence() for _ in range(work.sampling.n)] for _ in work.prompts]

    def add(self, prompt: int, delta: EngineDelta) -> None:
        """Take in what sequence `delta.index` of prompt number `prompt` gained."""
        self._count(prompt, delta)
        sequence = self._sequences[prompt][delta.index]
        sequence.texts.append(delta.text)
        sequence.token_ids.extend(delta.token_ids)
        sequence.logprobs.extend(delta.logprobs or ())
        if delta.finish_reason is not None:
            sequence.finish_reason = delta.finish_reason
            sequence.stop_reason = delta.stop_reason

    @property
    def logprob_entries(self) -> int:
        """About how many candidates the answer will hold: whether to encode it off the event loop."""
        positions = [p for prompt in self._prompt_logprobs.values() for p in prompt]
        positions += [p for prompt in self._sequences for sequence in prompt for p in sequence.logprobs]
        return sum(len(position) for position in positions if position is not None)

    def body(self, activations: bytes | None = None) -> bytes:
        """The answer as JSON; `activations` is JSON too. Raises MisbehavedEngine."""
        choices: list[Choice] = []
        for prompt, sequences in enumerate(self._sequences):
            prompt_logprobs = self._prompt_logprobs_json(prompt)
            for sequence in sequences:
                choices.append(self._choice(len(choices), prompt, sequence, prompt_logprobs))
        work = self.work
        answer = _json.encode(
            Answer(id=self.id, created=work.created, model=work.served_model_name, choices=choices, usage=self.usage)
        )
        if activations is None:
            return answer
        return b"".join((answer[:-1], b',"activations":', activations, b"}"))

    def _choice(self, index: int, prompt: int, sequence: _Sequence, prompt_logprobs: msgspec.Raw | None) -> Choice:
        if sequence.finish_reason is None:
            raise MisbehavedEngine("The engine ended a request without saying why.")
        work = self.work
        text = "".join(sequence.texts)
        logprobs = None
        if work.echo:
            text = self._echoed_text(prompt) + text
        if work.sampling.logprobs is not None:
            token_ids: list[int] = sequence.token_ids
            positions = sequence.logprobs
            if work.echo:
                token_ids = [*work.prompts[prompt], *token_ids]
                positions = [*self._echoed_logprobs(prompt), *positions]
            logprobs = self._logprobs(token_ids, positions, 0)
        return Choice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            token_ids=sequence.token_ids if work.return_token_ids else None,
            prompt_logprobs=prompt_logprobs,
            prompt_token_ids=work.prompts[prompt] if work.return_token_ids else None,
        )

    def _prompt_logprobs_json(self, prompt: int) -> msgspec.Raw | None:
        """`prompt_logprobs` of a prompt, encoded once for its n choices."""
        if self.work.sampling.prompt_logprobs is None:
            return None
        positions = [
            b"null"
            if position is None
            else _json.encode(
                {one.token_id: PromptLogprob(finite_logprob(one.logprob), one.rank, one.token) for one in position}
            )
            for position in self._echoed_logprobs(prompt)
        ]
        if len(positions) != len(self.work.prompts[prompt]):
            raise MisbehavedEngine("The engine left out log probabilities of the prompt.")
        return msgspec.Raw(b"[" + b",".join(positions) + b"]")


class StreamShaper(_Shaper):
    """Makes the chunks of a stream, each as JSON; `decode` as in AnswerBuilder."""

    def __init__(self, work: CompletionWork, decode: Callable[[Sequence[int]], str]) -> None:
        super().__init__(work, decode)
        choices = len(work.prompts) * work.sampling.n
        self._has_begun = [False] * choices
        self._next_offset = [0] * choices

    def chunk(self, prompt: int, delta: EngineDelta) -> bytes | None:
        """The chunk for `delta`, or None where it holds nothing to send yet. Raises MisbehavedEngine."""
        self._count(prompt, delta)
        work = self.work
        choice = prompt * work.sampling.n + delta.index
        is_first = not self._has_begun[choice]
        is_echo = is_first and work.echo
        if is_first and not (is_echo or delta.text or delta.token_ids or delta.finish_reason):
            return None
        self._has_begun[choice] = True
        text = delta.text
        token_ids: Sequence[int] = delta.token_ids
        positions: Sequence[PositionLogprobs | None] = delta.logprobs or ()
        if is_echo:
            text = self._echoed_text(prompt) + text
            token_ids = (*work.prompts[prompt], *token_ids)
        logprobs = None
        if work.sampling.logprobs is not None:
            if is_echo:
                positions = (*self._echoed_logprobs(prompt), *positions)
            logprobs = self._logprobs(token_ids, positions, self._next_offset[choice])
            # By the tokens, not the text: text that may become a stop string is held back behind them.
            self._next_offset[choice] += sum(map(len, logprobs.tokens))
        gained = ChunkChoice(
            index=choice,
            text=text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            prompt_token_ids=work.prompts[prompt] if is_first and work.return_token_ids else None,
            token_ids=delta.token_ids if work.return_token_ids else None,
        )
        return _json.encode(Chunk(id=self.id, created=work.created, model=work.served_model_name, choices=[gained]))

    def usage_chunk(self) -> bytes:
        """The last chunk of a stream that asked for its usage."""
        work = self.work
        return _json.encode(
            Chunk(id=self.id, created=work.created, model=work.served_model_name, choices=[], usage=self.usage)
        )
