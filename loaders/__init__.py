"""Bring the records a sampler names from shards into TensorFlow and PyTorch.

Shards: `pack` (packing/) writes them; `build_index` (building/) and `open_index`
(index/) say where each record and field lies, in TFRecord files, webdataset tar files or loose
files (formats/); `Reader` (reading/) reads records by id, `SideTable` rows;
`ByRecord` joins a table by record, `ByKey` by key.

Batches: a `Feed` (feed/) says what a training is fed. `NumpyLoader` (loop/) gives the batches to a
training loop, and so do the loaders of the backends, which import their framework:
`twinfeed.loaders.torch`, `twinfeed.loaders.tensorflow` and `twinfeed.loaders.jax`.
`twinfeed.loaders.grain` (grain.py) makes a dataset of Grain, `twinfeed.loaders.webdataset`
(webdataset.py) the first stage of a pipeline, and `twinfeed.loaders.keras` resumes `fit`. batches/
is what makes the batches of all of them.

`verify`, `compare` and `plan` (tools/) look at data and streams, and
`twinfeed.loaders.pictures` (pictures.py) draws them. The command `twinfeed` is command_line/. What
is raised is in errors.py.
"""

try:
    from twinfeed.lazy import attach
except ModuleNotFoundError as error:
    raise ImportError(
        "a folder named twinfeed, beside which Python was started, hides the installed library: "
        "start Python elsewhere"
    ) from error

import twinfeed.loaders.support.system  # noqa: F401 - on Windows, the message is there

__getattr__, __dir__, __all__ = attach(__name__, __file__)
