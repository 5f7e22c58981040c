#!/usr/bin/env bash
# Fine-tune a model on a folder of text, from the tokenizer on, on four MPI ranks of this machine:
#
#   1. a byte-pair tokenizer is made from the text
#   2. a small Llama learns from the standard library's source; it is the model to begin from
#   3. adapters (LoRA) learn from four fifths of the text
#   4. the loss on the last fifth, before and after, and a text after; the model as a folder for `transformers`
#
#   bash jobs/finetune.sh [TEXT [MODEL]]             TEXT: a folder of text, docs/ by default
#                                                    MODEL: a folder of Hugging Face, instead of steps 1 and 2
#   STEPS=500 RANKS=2 MPI=openmpi OUT=runs/mine bash jobs/finetune.sh      (variables: see jobs/common.sh)
set -euo pipefail
. "$(dirname "$0")/common.sh"
choose_mpi
install_package tokens
configure_mpi

text=${1:-docs} model=${2:-}
out=${OUT:-runs/finetune-$(date +%Y%m%d-%H%M%S)}
steps=${STEPS:-200}
[ -d "$text" ] || fail "$text is no folder"
[ ! -e "$out" ] || fail "$out is there already: name a new folder with OUT"
mkdir -p "$out/learn" "$out/keep"
tokenize() { "$python" -m mpipipe tokenize "$@"; }
mpipipe() { "$mpiexec" -n "${RANKS:=4}" "$python" -m mpipipe "$@"; }

number=0
find "$text" -type f -not -path '*/.*' -not -path '*/_build/*' \( -name '*.md' -o -name '*.txt' -o -name '*.rst' -o -name '*.py' \) |
    LC_ALL=C sort > "$out/files"
while read -r file; do
    number=$((number + 1))
    cp "$file" "$out/$([ $((number % 5)) = 0 ] && echo keep || echo learn)/$number-$(basename "$file")"
done < "$out/files"
[ "$number" -ge 5 ] || fail "$number files of text in $text: five or more are needed"

if [ -z "$model" ]; then
    "$python" - "$out/learn" "$out/tokenizer" << 'PYTHON'
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

source, folder = map(Path, sys.argv[1:])
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(
    vocab_size=1024, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
)
tokenizer.train(sorted(map(str, source.iterdir())), trainer)
folder.mkdir()
tokenizer.save(str(folder / "tokenizer.json"))
(folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
PYTHON
    library=$("$python" -c 'import json; print(json.__path__[0])')
    tokenize --tokenizer "$out/tokenizer" "$library" "$(dirname "$library")/email" --out "$out/library.tokens"
    mpipipe train --data "$out/library.tokens" --tokenizer "$out/tokenizer" --steps "$steps" --sample-bytes 0 \
        --out "$out/first"
    model=$out/first/weights
fi
tokenize --tokenizer "$model" "$out/learn" --out "$out/learn.tokens"
tokenize --tokenizer "$model" "$out/keep" --out "$out/keep.tokens"
loss() {  # of a model on the last fifth
    mpipipe evaluate "$1" --data "$out/keep.tokens" > "$out/evaluated"
    cat "$out/evaluated" >&2
    sed -n 's/^mpipipe: evaluated .*loss=\([^ ]*\).*/\1/p' "$out/evaluated"
}

before=$(loss "$model")
mpipipe train --from "$model" --lora 8,16,q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj \
    --data "$out/learn.tokens" --steps "$steps" --lr 0.01 --sample-bytes 0 --out "$out/tuned"
after=$(loss "$out/tuned")
mpipipe generate "$out/tuned" --prompt "A stage is" --count 60
"$python" -m mpipipe convert "$out/tuned" "$out/folder"
echo "mpipipe: fine-tuned $out/folder loss before=$before after=$after"
