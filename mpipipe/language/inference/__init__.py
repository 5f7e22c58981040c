"""Text from trained models, and their loss on a text.

generation.py   the cut of a model for forwards alone; a decoder, answers to many prompts, and how a token is drawn
evaluation.py   windows of a text, and the loss of a model on them
prompts.py      prompts of the command line and of files, and text that appears token by token
"""

from mpipipe.language.inference.evaluation import Evaluation as Evaluation
from mpipipe.language.inference.evaluation import Windows as Windows
from mpipipe.language.inference.evaluation import build_evaluator as build_evaluator
from mpipipe.language.inference.evaluation import open_tokens as open_tokens
from mpipipe.language.inference.evaluation import perplexity as perplexity
from mpipipe.language.inference.generation import Drawn as Drawn
from mpipipe.language.inference.generation import Sampling as Sampling
from mpipipe.language.inference.generation import answers as answers
from mpipipe.language.inference.generation import build_decoder as build_decoder
from mpipipe.language.inference.generation import check_prompts as check_prompts
from mpipipe.language.inference.generation import forward_plan as forward_plan
from mpipipe.language.inference.generation import shown as shown
from mpipipe.language.inference.prompts import Bytes as Bytes
from mpipipe.language.inference.prompts import FolderTokenizer as FolderTokenizer
from mpipipe.language.inference.prompts import Prompts as Prompts
from mpipipe.language.inference.prompts import TextStream as TextStream
from mpipipe.language.inference.prompts import parse_ids as parse_ids
from mpipipe.language.inference.prompts import read_prompts as read_prompts
