"""What the tests of transformers share, which import it where they need it: it takes seconds."""

import json
from pathlib import Path
from typing import Any

import transformers

from support.torch_feeds import RECORDS
from twinfeed.loaders.torch import TorchLoader


class Trainer(transformers.Trainer):
    """A Trainer over two loaders, which notes what its model is given."""

    def __init__(self, training: Any, evaluation: Any = None, **options: Any) -> None:
        self.loaders = training, evaluation
        self.noted: list[list[int]] = []
        config = transformers.BertConfig(
            vocab_size=RECORDS,
            hidden_size=4,
            num_hidden_layers=1,
            num_attention_heads=1,
            intermediate_size=4,
            num_labels=4,
        )
        super().__init__(transformers.BertForSequenceClassification(config), **options)

    def get_train_dataloader(self) -> Any:
        return self.loaders[0]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.loaders[1]

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **options: Any) -> Any:
        self.noted.append(inputs["id"].tolist())
        inputs = {"input_ids": inputs["input_ids"], "labels": inputs["label"]}
        return super().compute_loss(model, inputs, *given, **options)


class Place(transformers.TrainerCallback):
    """Keep the loader's state in each checkpoint."""

    def __init__(self, loader: TorchLoader) -> None:
        self.loader = loader

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        (folder / "loader.json").write_text(json.dumps(self.loader.state_dict()))


def arguments(folder: Path, **options: Any) -> Any:
    return transformers.TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=100, **options
    )
