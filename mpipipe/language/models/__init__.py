"""Models made of layers, to be cut into stages, and the folders that hold them.

gpt.py             GPT, Llama and their kin from one description
fine_tuning.py     what of a model is trained, and what a training begins from
model_folder.py    the one place where a folder with a model is opened; one kind turned into another
weights.py         the folder that a training leaves; huggingface/ those of `transformers` and PEFT
"""

from mpipipe.language.models.gpt import GPT
from mpipipe.language.models.huggingface.writing import SHARD_BYTES
from mpipipe.language.models.model_folder import ModelFolder, convert, open_on_all

__all__ = ["GPT"]
__dir__ = __all__.copy
