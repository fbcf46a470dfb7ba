"""What one streamed answer has shown so far: text deltas and their times, the server's token counts, how it ended.

Reads the server-sent events of /v1/completions and /v1/chat/completions. The first delta is the first one that carries
text, reasoning or a tool call: not the role chunk, not a comment (`: ping`), not empty content. One `data:` line is one
event, as every OpenAI server writes it.
"""

import orjson


class Answer:
    """Fed with body bytes in any split. Times are those of the bytes that completed a delta."""

    __slots__ = (
        "_rest", "answer_at_s", "deltas", "done", "events", "first_at_s", "gaps_s",
        "last_at_s", "output_tokens", "problem", "prompt_tokens", "reasoned",
    )  # fmt: skip

    def __init__(self) -> None:
        self.events = 0
        self.deltas = 0
        self.first_at_s: float | None = None
        self.last_at_s = 0.0
        self.gaps_s: list[float] = []  # between successive deltas
        self.reasoned = False  # reasoning came before any content
        self.answer_at_s: float | None = None  # first content after reasoning
        self.prompt_tokens: int | None = None  # latest usage counts
        self.output_tokens: int | None = None
        self.done = False  # [DONE] or a finish_reason was seen
        self.problem: str | None = None
        self._rest = b""

    def feed(self, body: bytes, now_s: float) -> None:
        lines = (self._rest + body).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._read_event(line[5:].strip(), now_s)

    def end(self, now_s: float) -> str | None:
        """The body is over. Returns what is wrong with the answer, or None."""
        self.feed(b"\n", now_s)  # a last line without its line break
        if self.problem:
            return self.problem
        if self.deltas == 0 and (self.done or self.events == 0):
            return "empty"
        return None if self.done else "stream ended early"

    def _read_event(self, data: bytes, now_s: float) -> None:
        self.events += 1
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = orjson.loads(data)
            if event.get("error") or event.get("object") == "error":
                self.problem = "error event"
                return
            if usage := event.get("usage"):  # null in most chunks; the chunk that has it may have no choices
                self.prompt_tokens = int(usage["prompt_tokens"])
                self.output_tokens = int(usage["completion_tokens"])
            elif timings := event.get("timings"):  # llama.cpp's running counts
                self.prompt_tokens = int(timings["prompt_n"]) + int(timings.get("cache_n", 0))
                self.output_tokens = int(timings["predicted_n"])
            for choice in event.get("choices") or ():
                if choice.get("finish_reason"):
                    self.done = True
                delta = choice.get("delta") or choice  # a completion has its text in the choice
                if delta.get("text") or delta.get("content") or delta.get("tool_calls"):
                    self._delta(now_s, content=True)
                elif delta.get("reasoning_content") or delta.get("reasoning"):
                    self._delta(now_s, content=False)
        except (ValueError, TypeError, AttributeError, KeyError):
            self.problem = "unreadable event"

    def _delta(self, now_s: float, content: bool) -> None:
        self.deltas += 1
        if self.first_at_s is None:
            self.first_at_s = now_s
            self.reasoned = not content
        else:
            self.gaps_s.append(now_s - self.last_at_s)
            if content and self.reasoned and self.answer_at_s is None:
                self.answer_at_s = now_s
        self.last_at_s = now_s
