"""Evaluate and predict with Keras under a strategy of one or two replicas.

python keras_evaluate.py
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf
from records import WEIGHTS, N, Records, report

from twinfeed import ExactOnceBatchSampler, Feed, Results, TensorFlowLoader


def evaluate(devices: list[str]) -> None:
    """Evaluate on these devices, and report what was predicted for each record."""
    with tf.distribute.MirroredStrategy(devices).scope():
        x, record = keras.Input((4,), name="x"), keras.Input((), name="id", dtype="int64")
        logits = keras.layers.Dense(3, use_bias=False, name="logits")(x)
        inputs, same = {"x": x, "id": record}, keras.layers.Identity()(record)
        model = keras.Model(inputs, logits)
        predictor = keras.Model(inputs, {"logits": logits, "id": same})  # the same layers
        model.get_layer("logits").set_weights([WEIGHTS])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(loss=loss, metrics=["accuracy"])

    sampler = ExactOnceBatchSampler(N, batch_size=32)  # of all replicas
    loader = TensorFlowLoader(Feed(Records(), sampler, fields=("x", "label")))
    found = model.evaluate(loader.dataset.map(inputs_and_label), verbose=0, return_dict=True)
    print(f"accuracy {found['accuracy']:.4f}, cross entropy {found['loss']:.4f}")

    predicted = predictor.predict(loader.dataset.map(inputs_and_label), verbose=0)
    results = Results(N)
    label = np.array([Records()[record]["label"] for record in predicted["id"]])
    results.add(predicted["id"], logits=predicted["logits"], label=label)
    report(results.gather())


def inputs_and_label(batch: dict[str, tf.Tensor]) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Return a batch as Keras takes it."""
    return {"x": batch["x"], "id": batch["id"]}, batch["label"]


if __name__ == "__main__":
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    evaluate(["/CPU:0"])
    evaluate(["/CPU:0", "/CPU:1"])
