"""bench threads: a line for each comparison."""

import re
from importlib.util import find_spec

from mpipipe import processor
from mpipipe.bench import threads

SMALL = ["--repeats", "1", "--dim", "16", "--layers", "1", "--heads", "2", "--seq-len", "16"]
LINE = r"{}.*\d+ threads: .*; ratio \d+\.\d\d \(.*\)"


def test_each_kernel_and_step_has_its_line(launch):
    job = launch(0, ["-m", "mpipipe", "bench", "threads", *SMALL, "--megabytes", "4"])
    beside = ["train, one micro-batch"] if find_spec("torch") else []
    names = ["copy", "AdamW", "LayerNorm", "GELU", "softmax", "step of a GPT of", *beside, "step of a small GPT"]
    for name, line in zip(names, job.stdout.splitlines(), strict=True):
        assert re.fullmatch(LINE.format(name), line), job.stderr


def test_a_candidate_leaves_the_number_of_threads_as_it_was():
    before = processor.thread_count()
    found = []
    threads._with(before + 2, lambda: found.append(processor.thread_count()))()
    assert (found, processor.thread_count()) == ([before + 2], before)
