#!/usr/bin/env bash
# LengthGroupedSampler inside unmodified XTuner 0.2.0, on a CPU: XTuner's train tool, its
# process_hf_dataset and its collate function, with only the sampler's type changed.
#   tools/check_in_xtuner.sh EMPTY_FOLDER
# See CONTRIBUTING.md for what to expect. Needs Python 3.11 or 3.12 and the package index.
set -euo pipefail
xlength=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "${1:?give an empty folder to work in}" && cd "$1"

# XTuner pins other versions than xlength does, so it gets an environment of its own.
${PYTHON:-python3.11} -m venv env && . env/bin/activate
pip install torch==2.13.0 'transformers==4.57.*' 'datasets==4.8.*' mmengine==0.10.7 peft scikit-image
pip install --no-deps xtuner==0.2.0
pip install --no-deps -e "$xlength"

# Without an accelerator XTuner and mmengine also ask for things that a CPU build of torch lacks.
# A stand-in for torchvision, which XTuner imports in any case, supplies them.
mkdir -p stub/torchvision/transforms && touch stub/torchvision/transforms/__init__.py
cat > stub/torchvision/__init__.py <<'E'
import torch

__version__ = '0'
torch.cpu.is_bf16_supported = lambda: False
torch.cuda.set_device = lambda device: None
E
cat > stub/torchvision/transforms/functional.py <<'E'
from enum import Enum

InterpolationMode = Enum('InterpolationMode', 'BICUBIC')
E
export PYTHONPATH=$PWD/stub HF_HUB_OFFLINE=1

# Text, a tokenizer and a random model of two layers.
cat > prepare.py <<'E'
import inspect, json, turtle, typing, unittest, tarfile, zipfile, datetime, pathlib, statistics, threading
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

texts = {}
for module in (turtle, typing, unittest, tarfile, zipfile, datetime, pathlib, statistics, threading):
    for owner in [module, *(v for v in vars(module).values() if inspect.isclass(v))]:
        for name, member in inspect.getmembers(owner, callable):
            if inspect.getdoc(member):
                texts.setdefault(inspect.getdoc(member), f'{owner.__name__}.{name}')
with open('docs.jsonl', 'w') as f:
    for text, name in texts.items():
        messages = [dict(role='user', content=name), dict(role='assistant', content=text)]
        f.write(json.dumps(dict(messages=messages)) + '\n')
bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
alphabet = pre_tokenizers.ByteLevel.alphabet()
bpe.train_from_iterator(texts, trainers.BpeTrainer(
    vocab_size=2000, special_tokens=['<pad>', '<s>', '</s>'], initial_alphabet=alphabet))
PreTrainedTokenizerFast(
    tokenizer_object=bpe, pad_token='<pad>', bos_token='<s>', eos_token='</s>').save_pretrained('tiny')
LlamaForCausalLM(LlamaConfig(
    vocab_size=2000, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    pad_token_id=0, bos_token_id=1, eos_token_id=2)).save_pretrained('tiny')
E
python prepare.py

# A config with XTuner's own sampler, and the same with ours; only the sampler's type differs.
cat > theirs.py <<'E'
from datasets import load_dataset
from mmengine.hooks import LoggerHook
from mmengine.optim import OptimWrapper
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, AutoTokenizer
from xtuner.dataset import process_hf_dataset
from xtuner.dataset.collate_fns import default_collate_fn
from xtuner.dataset.map_fns import openai_map_fn, template_map_fn_factory
from xtuner.dataset.samplers import LengthGroupedSampler
from xtuner.engine.runner import TrainLoop
from xtuner.model import SupervisedFinetune
from xtuner.utils import PROMPT_TEMPLATE

batch_size = 4
accumulative_counts = 2
tokenizer = dict(type=AutoTokenizer.from_pretrained, pretrained_model_name_or_path='tiny')
model = dict(
    type=SupervisedFinetune,
    llm=dict(type=AutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path='tiny'))
train_dataset = dict(
    type=process_hf_dataset,
    dataset=dict(type=load_dataset, path='json', data_files='docs.jsonl'),
    tokenizer=tokenizer, max_length=512, dataset_map_fn=openai_map_fn,
    template_map_fn=dict(type=template_map_fn_factory, template=PROMPT_TEMPLATE.default),
    remove_unused_columns=True, pack_to_max_length=False, map_num_proc=2)
train_dataloader = dict(
    batch_size=batch_size, num_workers=0, dataset=train_dataset,
    sampler=dict(
        type=LengthGroupedSampler, length_property='length',
        per_device_batch_size=batch_size * accumulative_counts),
    collate_fn=dict(type=default_collate_fn))
optim_wrapper = dict(
    type=OptimWrapper, optimizer=dict(type=AdamW, lr=3e-3), accumulative_counts=accumulative_counts)
train_cfg = dict(type=TrainLoop, max_epochs=1)
default_hooks = dict(logger=dict(type=LoggerHook, log_metric_by_epoch=False, interval=10))
log_processor = dict(by_epoch=False)
env_cfg = dict(dist_cfg=dict(backend='gloo'))  # nccl with GPUs, and no model_wrapper_cfg
model_wrapper_cfg = dict(type='MMDistributedDataParallel', device_ids=None)
E
sed "s/type=LengthGroupedSampler/type='xlength.LengthGroupedSampler'/" theirs.py > ours.py

export OMP_NUM_THREADS=1
echo "== XTuner's own sampler: an empty AssertionError is expected"
python -m xtuner.tools.train theirs.py && exit 1
echo "== xlength's, on one process"
python -m xtuner.tools.train ours.py
echo "== xlength's, on two"
torchrun --nproc_per_node=2 -m xtuner.tools.train ours.py --launcher pytorch
