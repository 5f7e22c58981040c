"""The state of a training as files, saved by all ranks and loaded by any number of them.

    RUN/checkpoints/step-00000100/part-0.safetensors    arrays by their names in the whole model
                                  part-1.safetensors
                                  manifest.json         step, state, checksums; written last

A folder with a manifest is whole: each file is written under another name, forced to the disk, and
then renamed, and the manifest comes last.

    tensor_files   arrays in a file of the safetensors format
    contents       what a checkpoint holds of a rank, by name
    folders        its folder, and the manifest
    save_task      one checkpoint on its way, in a thread
    saver          all ranks together
    loading        by any number of ranks
    replicas       what must be equal is compared
    owner          one job writes into a folder
    whole_folder   a folder is replaced as a whole
"""

from mpipipe.checkpoint.contents import PARAMETERS
from mpipipe.checkpoint.folders import (
    MANIFEST,
    Checkpoint,
    checksum_of,
    find,
    newest,
    set_aside,
    step_of,
    write_facts,
)
from mpipipe.checkpoint.loading import load, read, read_arrays
from mpipipe.checkpoint.owner import check_owned, is_owner_file, released_at_end, take_folder
from mpipipe.checkpoint.replicas import check_replicas
from mpipipe.checkpoint.saver import Saver, save
from mpipipe.checkpoint.tensor_files import NAMES, Planned, TensorFile, open_tensors, write_tensors
from mpipipe.checkpoint.whole_folder import newest_state, replacing, restore_folder, standing_folder

# The rest is internal.
__all__ = ["Saver", "check_replicas", "load", "newest", "read", "save"]
__dir__ = __all__.copy
