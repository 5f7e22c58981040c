"""Text from trained models, and their loss on a text.

generation.py   a decoder, answers to many prompts, and how a token is drawn
evaluation.py   windows of a text, and the loss of a model on them
prompts.py      prompts of the command line and of files
"""

from mpipipe.language.inference.evaluation import (
    build_evaluator,
    count_windows,
    open_tokens,
    perplexity,
)
from mpipipe.language.inference.generation import (
    Answer,
    Sampling,
    answers,
    build_decoder,
    check_prompts,
    forward_plan,
    shown,
)
from mpipipe.language.inference.prompts import Bytes, FolderTokenizer, Prompts, read_prompts
