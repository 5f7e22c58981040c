"""Where the answers to prompts go: to the terminal while they are drawn, one after the other, or into a file."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from mpipipe import files
from mpipipe.errors import ConfigError
from mpipipe.train.generation import Drawn
from mpipipe.train.model_folder import Tokenizer
from mpipipe.train.outlet import Outlet
from mpipipe.train.prompts import Prompts
from mpipipe.train.sample import shown
from mpipipe.train.text_stream import TextStream


class Answers(ABC):
    """What is done with the tokens that are drawn: a context manager on rank 0."""

    @abstractmethod
    def take(self, drawn: Drawn) -> None:
        """Take one token of one answer."""

    def __enter__(self) -> Answers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class Streamed(Answers):
    """One prompt and its answer, written to standard output while the answer is drawn."""

    def __init__(self, prompt: list[int], tokenizer: Tokenizer) -> None:
        self.stream, self.outlet = TextStream(tokenizer), Outlet(sys.stdout)
        self.prompt = prompt

    def take(self, drawn: Drawn) -> None:
        new = [] if drawn.ended == "stop" else [drawn.token]
        self.outlet.write(shown(self.stream.feed([*self.prompt, *new])))
        self.prompt = []
        if drawn.ended:
            self.outlet.write(shown(self.stream.end()) + "\n")


class InOrder(Answers):
    """Answers that are shown whole, in the order of their prompts."""

    def __init__(self, prompts: Prompts, tokenizer: Tokenizer | None) -> None:
        self.prompts, self.tokenizer = prompts, tokenizer
        self.answers: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}
        self.next = 0

    def take(self, drawn: Drawn) -> None:
        self.answers.setdefault(drawn.prompt, []).append(drawn.token)
        if drawn.ended:
            self.ended[drawn.prompt] = drawn.ended
        while self.next in self.ended:
            self.show(self.next, self.answers.pop(self.next), self.ended.pop(self.next))
            self.next += 1

    @abstractmethod
    def show(self, number: int, answer: list[int], ended: str) -> None:
        """Show one answer; `ended` says why it has ended: "stop" or "count"."""

    def text_of(self, answer: list[int], ended: str, before: list[int]) -> str:
        """Return the text of an answer behind other tokens, with them; without the token that has stopped it."""
        assert self.tokenizer is not None
        return self.tokenizer.decode([*before, *(answer[:-1] if ended == "stop" else answer)])


class Printed(InOrder):
    """Prompts and answers on standard output: text under a line with the number, or a line of ids."""

    def show(self, number: int, answer: list[int], ended: str) -> None:
        prompt, outlet = self.prompts.tokens[number], Outlet(sys.stdout)
        if self.tokenizer is None or self.prompts.texts[number] is None:
            outlet.write(f"mpipipe: tokens {','.join(map(str, [*prompt, *answer]))}\n")
        else:
            outlet.write(f"--- prompt {number}\n{shown(self.text_of(answer, ended, prompt))}\n")


class WrittenLines(InOrder):
    """A file with one line of JSON for each prompt, which appears when all are there.

    Raises ConfigError if the file exists already, or cannot be written.
    """

    def __init__(self, prompts: Prompts, tokenizer: Tokenizer | None, path: str) -> None:
        super().__init__(prompts, tokenizer)
        self.path, self.opened = Path(path), ExitStack()
        self.file: BinaryIO | None = None

    def __enter__(self) -> WrittenLines:
        if files.exists(self.path):
            raise ConfigError("the file for answers exists already", found=str(self.path), remedy="name another --out")
        try:
            self.file = self.opened.enter_context(files.whole_file(self.path))
        except OSError as error:
            raise self._unwritable(error) from error
        return self

    def show(self, number: int, answer: list[int], ended: str) -> None:
        assert self.file is not None
        prompt = self.prompts.tokens[number]
        facts = {"number": number, "prompt_tokens": prompt, "answer_tokens": answer, "ended": ended}
        if self.tokenizer is not None:
            facts |= {"prompt": self.tokenizer.decode(prompt), "answer": self.text_of(answer, ended, [])}
        try:
            self.file.write(f"{json.dumps(facts)}\n".encode())
        except OSError as error:
            raise self._unwritable(error) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.opened.__exit__(kind, error, trace)
        except OSError as caught:
            raise self._unwritable(caught) from caught

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"the answers cannot be written: {error.strerror}", found=str(self.path), remedy="name another --out"
        )
