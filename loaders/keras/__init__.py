"""Resume Keras's `fit` at any step, on any backend. The only package here that imports keras.

- callback.py: `ResumeCallback`, which counts, saves and resumes.
- _given.py: what `fit` is given, refused if Keras's error would not help.
- _batches.py: the batches of a loader that has no dataset of its own for Keras.
- _order.py: the callbacks of a resumed `fit`, and when they get their saved values back.
- _known.py: the values of each callback that a save has.
- _model.py: what a save has of a model beside its weights.
- _saves.py: saves on the disk.
"""

from twinfeed.loaders.support.extras import needing

with needing("twinfeed.loaders.keras", "tensorflow"):
    from twinfeed.loaders.keras.callback import ResumeCallback

__all__ = ["ResumeCallback"]
