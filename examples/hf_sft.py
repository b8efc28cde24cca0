"""Fine-tunes a small Llama with transformers' Trainer, or TRL's SFTTrainer, on packed documents.

    torchrun --nproc-per-node 4 examples/hf_sft.py --json four.json
    torchrun --nproc-per-node 4 examples/hf_sft.py --cp-size 2 --trl

Needs accelerate (1.10 or newer), and --trl needs trl. Uses GPUs and NCCL if there is a GPU for each
rank of the machine, the CPU and gloo otherwise. Losses do not depend on the number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    ByT5Tokenizer,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from ring_flash_attn import ContextParallel, prepare_hf_model

TEXT = Path(__file__).parent / "data" / "poems.txt"  # documents are separated by lines of ***


class ContextParallelMixin:
    """Goes before Trainer or SFTTrainer; `cp_size` neighbouring ranks share each sequence."""

    def __init__(self, *args, cp_size, **kwargs):
        super().__init__(*args, **kwargs)
        own_loss = self.label_smoother, self.compute_loss_func
        router = getattr(self.model.config, "output_router_logits", False)
        if any(own_loss) or router or getattr(self.args, "loss_type", None) == "dft":
            raise NotImplementedError("only the plain cross-entropy is computed over ranks")
        ranks = self.accelerator.num_processes
        if ranks % cp_size:
            raise ValueError(f"cp_size = {cp_size} must divide the {ranks} ranks")
        shape, names = (ranks // cp_size, cp_size), ("dp_replicate", "cp")
        self.mesh = init_device_mesh(self.args.device.type, shape, mesh_dim_names=names)
        self.cp = ContextParallel(self.mesh["cp"])
        self.model_accepts_loss_kwargs = True  # losses are over the items of the whole step

    def get_train_dataloader(self):
        accelerator = self.accelerator  # gives all ranks of mesh["cp"] the same batches
        accelerator.state.device_mesh, accelerator.device_placement = self.mesh, False
        try:
            return super().get_train_dataloader()
        finally:
            accelerator.state.device_mesh, accelerator.device_placement = None, True

    def get_batch_samples(self, *args, **kwargs):
        batches, _ = super().get_batch_samples(*args, **kwargs)
        parts = [self.cp.shard(batch, device=self.args.device) for batch in batches]
        num_items = torch.zeros((), dtype=torch.int64, device=self.args.device)
        num_items = sum((part.pop("num_items_in_batch") for part in parts), start=num_items)
        dist.all_reduce(num_items, group=self.mesh.get_group("dp_replicate"))
        return parts, num_items

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if "documents" not in inputs:  # evaluation: on one device, after use_ring_attn(False)
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        targets = inputs.pop("shift_labels")
        outputs = model(**inputs)
        ranks = self.accelerator.num_processes  # DDP averages gradients over all
        loss = self.cp.loss(
            outputs.logits, targets, num_items=num_items_in_batch, averaged_over=ranks
        )
        return (loss, outputs) if return_outputs else loss


class Recorder:
    """Goes before that: keeps losses, of which Trainer's log has four digits."""

    losses: list[float]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        step = self.state.global_step  # type: ignore[attr-defined]
        self.losses += [0.0] * (step + 1 - len(self.losses))
        self.losses[step] += self.accelerator.reduce(loss, "mean").item()  # type: ignore[attr-defined]
        return loss


def train(options: argparse.Namespace, folder: str) -> dict[str, list[float]]:
    """Losses and norms of gradients of all steps."""
    tokenizer = ByT5Tokenizer()
    texts = options.text.read_text(encoding="utf-8").split("\n***\n")
    encoded = tokenizer([t.strip() for t in texts], truncation=True, max_length=options.max_length)
    documents = [{"input_ids": ids} for ids in encoded["input_ids"]]

    set_seed(0)  # all ranks start from the same parameters
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = prepare_hf_model(LlamaForCausalLM(config))

    arguments = {
        "output_dir": folder,
        "per_device_train_batch_size": options.batch_size,
        "gradient_accumulation_steps": options.accumulation,
        "max_steps": options.steps,
        "learning_rate": options.lr,
        "gradient_checkpointing": True,
        "bf16": False,
        "logging_steps": 1,
        "disable_tqdm": True,
        "save_strategy": "no",
        "report_to": "none",
    }
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        arguments |= {"use_cpu": True, "ddp_backend": "gloo"}
    more: dict[str, Any]
    if options.trl:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        kind: type = SFTTrainer
        args = SFTConfig(packing=True, max_length=options.max_length, **arguments)
        more = {"train_dataset": Dataset.from_list(documents), "processing_class": tokenizer}
    else:
        kind, args = Trainer, TrainingArguments(**arguments)
        more = {"train_dataset": documents, "data_collator": DataCollatorWithFlattening()}

    class ContextParallelTrainer(Recorder, ContextParallelMixin, kind):  # type: ignore[misc]
        pass

    trainer = ContextParallelTrainer(model=model, args=args, cp_size=options.cp_size, **more)
    trainer.losses = []
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {"losses": trainer.losses, "grad_norms": [entry["grad_norm"] for entry in history]}


def main() -> None:
    """Trains under torchrun; the first rank writes what it found."""
    options = parse_options()
    with tempfile.TemporaryDirectory() as folder:
        found = train(options, folder)
    if dist.get_rank() == 0 and options.json:
        record = {"world_size": dist.get_world_size(), **found, "options": vars(options)}
        options.json.write_text(json.dumps(record, default=str, indent=1), encoding="utf-8")
    dist.destroy_process_group()


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--cp-size", type=int, help="ranks that share a sequence; all if not given")
    add("--trl", action="store_true", help="SFTTrainer with packing instead of Trainer")
    add("--text", type=Path, default=TEXT, help="documents, separated by lines of ***")
    add("--max-length", type=int, default=512, help="tokens of a document; with --trl, of a pack")
    add("--batch-size", type=int, default=4, help="documents of a pack; with --trl, packs")
    add("--accumulation", type=int, default=2, help="packs of one optimiser step and group")
    add("--steps", type=int, default=20)
    add("--width", type=int, default=64)
    add("--layers", type=int, default=2)
    add("--lr", type=float, default=3e-3)
    add("--json", type=Path, help="write losses and norms of gradients here")
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node N examples/hf_sft.py")
    options.cp_size = options.cp_size or int(os.environ["WORLD_SIZE"])
    return options


if __name__ == "__main__":
    main()
