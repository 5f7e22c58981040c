"""Model folders of Hugging Face, read into models.GPT and written again."""

from mpipipe.language.models.huggingface.folder import Folder, Origin, open_folder
from mpipipe.language.models.huggingface.reading import read
from mpipipe.language.models.huggingface.writing import save

__all__ = ["read", "save"]
__dir__ = __all__.copy
