"""Resume Keras's `fit` at any step, on any backend. The only package here that imports keras.

- callback.py: `ResumeCallback`, which counts, checkpoints and resumes.
- _fit_arguments.py: checks of the arguments of `fit`, where Keras's error would not help.
- _data_adapter.py: Keras's data adapter for a loader that has no dataset of its own for Keras.
- _callback_list.py: the callbacks of a resumed `fit`, and when they get their saved values back.
- _callback_states.py: the values of each callback that a checkpoint has.
- _model.py: what a checkpoint has of a model beside its weights.
- _checkpoints.py: checkpoints on the disk.
"""

from twinfeed.loaders.support.extras import requires_extra

with requires_extra("twinfeed.loaders.keras", "tensorflow"):
    from twinfeed.loaders.keras.callback import ResumeCallback

__all__ = ["ResumeCallback"]
