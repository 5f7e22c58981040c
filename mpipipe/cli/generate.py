"""mpipipe generate: a model continues prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, TypeAlias

from mpipipe import files
from mpipipe.cli.flags import Operand
from mpipipe.cli.output import on_ranks
from mpipipe.comm import Mesh
from mpipipe.errors import ConfigError
from mpipipe.job import group_of, runtime
from mpipipe.language.inference import (
    Answer,
    Bytes,
    FolderTokenizer,
    Prompts,
    Sampling,
    answers,
    build_decoder,
    check_prompts,
    forward_plan,
    read_prompts,
    shown,
)
from mpipipe.language.models import ModelFolder, open_on_all
from mpipipe.options import Option
from mpipipe.train import SafeStream

DTYPES = ("float32", "float64")
# Prompts for each micro-batch in flight, by default.
AT_ONCE = 8


@on_ranks
def generate(
    run: Annotated[str, Operand("folder with a model: of a training, or a checkpoint")],
    prompt: Annotated[
        str | None, Option("text to continue; default: a line break", empty=True)
    ] = None,
    prompts: Annotated[
        str | None, Option("file with a prompt on each line, as text or as JSON (.jsonl)")
    ] = None,
    count: Annotated[
        int, Option("most tokens of an answer", names=("--count", "--bytes"), least=1)
    ] = 200,
    temperature: Annotated[float, Option("0 takes the most likely token")] = 0.8,
    seed: Annotated[int, Option("seed of the random numbers", least=0, most=2**63 - 1)] = 0,
    batch: Annotated[
        int | None, Option("prompts at once; default: 8, or 32 per pipeline rank", least=1)
    ] = None,
    out: Annotated[str | None, Option("new file for the answers, as lines of JSON")] = None,
    dtype: Annotated[
        str | None, Option("type to compute in; default: the model's", choices=DTYPES)
    ] = None,
) -> None:
    """Continue prompts with a model.

    An example: mpiexec -n 2 python -m mpipipe generate runs/first --prompt "def main(". The ranks
    are a pipeline, however the training was cut. A text may be longer than the sequences of the
    training. Each layer then looks back over their length. Many prompts go through the model at
    once; the answers come in their order.
    """
    comm = runtime.world()
    group = group_of(comm)
    folder = open_on_all(comm, run)
    with Mesh(comm, pipe=comm.size) as mesh, ExitStack() as opened:
        prepared = None
        show = None
        with group.raise_together("generate: the model and the prompts"):
            plan = forward_plan(folder.model, mesh.pipe.size)
            if mesh.rank == 0:
                tokenizer = tokenizer_of(folder)
                read = read_prompts(prompt, prompts, tokenizer)
                check_prompts(read.tokens, count, folder.model.vocab)
                # The ids that end an answer.
                ends = folder.ends
                if not ends and tokenizer is not None and tokenizer.end is not None:
                    ends = (tokenizer.end,)
                prepared = read.tokens, Sampling(temperature, seed, ends)
                if out is None:
                    show = printed(read, tokenizer)
                else:
                    show = opened.enter_context(written_lines(tokenizer, out))
        tokens, sampling = group.broadcast("generate: the prompts", prepared)
        capacity = max(map(len, tokens)) + count
        at_once = min(len(tokens), batch or AT_ONCE * plan.schedule.microbatches)
        load = partial(folder.load, mesh=mesh)
        with build_decoder(
            folder.model, plan, mesh, dtype or folder.dtype, capacity, load, batch=at_once
        ) as decoder:
            for answer in answers(decoder, tokens, count, sampling):
                if show is not None:
                    show(answer)
        with group.raise_together("generate: the end of the output"):
            opened.close()


def tokenizer_of(folder: ModelFolder) -> FolderTokenizer | None:
    """Return the tokenizer of a model, None without one. ConfigError for that of another model."""
    vocab = folder.model.vocab
    tokenizer = folder.tokenizer()
    if tokenizer is None and vocab == Bytes.vocab:
        return Bytes()
    if tokenizer is not None and tokenizer.vocab > vocab:
        raise ConfigError(
            "the tokenizer is one of another model",
            found=f"{tokenizer.vocab} token ids in {folder.path}",
            expected=f"at most {vocab}, which the model knows",
        )
    return tokenizer


# -- Where the answers to prompts go: to the terminal, or into a file ------------------------------


# It is called on rank 0, with one answer.
Show: TypeAlias = Callable[[Answer], None]


def _text_of(tokenizer: FolderTokenizer, answer: Answer, before: Sequence[int]) -> str:
    """Return the text of an answer after other tokens, without the token that has stopped it."""
    tokens = [*before, *answer.tokens]
    if answer.ended == "stop":
        tokens.pop()
    return tokenizer.decode(tokens)


def printed(prompts: Prompts, tokenizer: FolderTokenizer | None) -> Show:
    """Print prompts and answers: text, of several under a line with the number, or ids."""

    def show(answer: Answer) -> None:
        outlet = SafeStream(sys.stdout)
        if tokenizer is None or prompts.texts[answer.number] is None:
            tokens = map(str, [*answer.prompt, *answer.tokens])
            outlet.write(f"mpipipe: tokens {','.join(tokens)}\n")
            return
        heading = ""
        if len(prompts.texts) > 1:
            heading = f"--- prompt {answer.number}\n"
        outlet.write(f"{heading}{shown(_text_of(tokenizer, answer, answer.prompt))}\n")

    return show


@contextmanager
def written_lines(tokenizer: FolderTokenizer | None, path: str) -> Iterator[Show]:
    """Write a new file with a line of JSON for each prompt, which appears as a whole."""
    writing = partial(files.writing, "the answers", path, remedy="name another --out")
    files.check_new("the file of answers", path)
    with ExitStack() as opened:
        with writing():
            file = opened.enter_context(files.whole_file(Path(path)))

        def show(answer: Answer) -> None:
            facts = {
                "number": answer.number,
                "prompt_tokens": answer.prompt,
                "answer_tokens": answer.tokens,
                "ended": answer.ended,
            }
            if tokenizer is not None:
                facts["prompt"] = tokenizer.decode(answer.prompt)
                facts["answer"] = _text_of(tokenizer, answer, [])
            with writing():
                file.write(f"{json.dumps(facts)}\n".encode())

        yield show
        with writing():
            opened.close()
