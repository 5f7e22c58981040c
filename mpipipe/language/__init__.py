"""Models of language: all that knows of tokens, on top of a training of any model.

task, config            the training of text as a task of `mpipipe.train`; its configuration
packing.py              attention within documents, where sequences hold several
token_units.py          what a token is: bits per byte, and ids as text
data/                   text and files of tokens, windows of them, `mpipipe tokenize`
models/                 GPT; folders of models, read and written; what of a model is trained
inference/              text from a model, and its loss on a text
"""

from mpipipe.language import data, models
from mpipipe.language.config import TrainConfig
from mpipipe.language.task import TextTask, train

__all__ = ["TrainConfig", "data", "models", "train"]
__dir__ = __all__.copy
