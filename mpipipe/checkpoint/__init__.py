"""The state of a training as files, saved by all ranks and loaded by any number of them.

    RUN/checkpoints/step-00000100/part-0.safetensors    arrays by their names in the whole model
                                  part-1.safetensors
                                  manifest.json         step, state, sizes and checksums; written last

A folder with a manifest is whole: each file is written under another name, forced to the disk, and then renamed, and
the manifest comes last.

    tensor_files   arrays in a file of the safetensors format; folders and models of every kind use it
    contents       what a checkpoint holds of a rank, by name          folders        its folder, and the manifest
    save_task      one checkpoint on its way, in a thread              saver          all ranks together
    loading        by any number of ranks                              replicas       what must be equal is compared
    owner          one job writes into a folder                        whole_folder   a folder is replaced as a whole
"""

# `x as x` is for other rooms of the package; what scripts use is in __all__
from mpipipe.checkpoint.contents import PARAMETERS as PARAMETERS
from mpipipe.checkpoint.folders import MANIFEST as MANIFEST
from mpipipe.checkpoint.folders import Checkpoint, newest, prune
from mpipipe.checkpoint.folders import checksum_of as checksum_of
from mpipipe.checkpoint.folders import find as find
from mpipipe.checkpoint.folders import set_aside as set_aside
from mpipipe.checkpoint.folders import step_of as step_of
from mpipipe.checkpoint.loading import load, read
from mpipipe.checkpoint.loading import read_arrays as read_arrays
from mpipipe.checkpoint.owner import Owner as Owner
from mpipipe.checkpoint.owner import check_owned as check_owned
from mpipipe.checkpoint.owner import is_owner_file as is_owner_file
from mpipipe.checkpoint.owner import keep_folder as keep_folder
from mpipipe.checkpoint.owner import owner_of as owner_of
from mpipipe.checkpoint.owner import released_at_end as released_at_end
from mpipipe.checkpoint.owner import take_folder as take_folder
from mpipipe.checkpoint.replicas import check_replicas
from mpipipe.checkpoint.saver import Saver, save
from mpipipe.checkpoint.tensor_files import NAMES as NAMES
from mpipipe.checkpoint.tensor_files import Planned as Planned
from mpipipe.checkpoint.tensor_files import TensorEntry as TensorEntry
from mpipipe.checkpoint.tensor_files import TensorFile as TensorFile
from mpipipe.checkpoint.tensor_files import header_of as header_of
from mpipipe.checkpoint.tensor_files import open_tensors as open_tensors
from mpipipe.checkpoint.tensor_files import write_tensors as write_tensors
from mpipipe.checkpoint.whole_folder import check_same_folder as check_same_folder
from mpipipe.checkpoint.whole_folder import folder_identity as folder_identity
from mpipipe.checkpoint.whole_folder import replacing as replacing
from mpipipe.checkpoint.whole_folder import restore_folder as restore_folder
from mpipipe.checkpoint.whole_folder import standing_folder as standing_folder

__all__ = ["Checkpoint", "Saver", "check_replicas", "load", "newest", "prune", "read", "save"]
