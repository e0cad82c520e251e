from twinfeed.loaders.building.build import build_index as build_index
from twinfeed.loaders.feed.decode import DecodeImage as DecodeImage
from twinfeed.loaders.feed.seeded import Seeded as Seeded
from twinfeed.loaders.feed.shuffling import shuffled as shuffled
from twinfeed.loaders.index import open_index as open_index
from twinfeed.loaders.loop.numpy_loader import NumpyLoader as NumpyLoader
from twinfeed.loaders.making.feed import Feed as Feed
from twinfeed.loaders.packing import ImageFolder as ImageFolder
from twinfeed.loaders.packing import pack as pack
from twinfeed.loaders.reading.reader import Reader as Reader
from twinfeed.loaders.reading.rows import Rows as Rows
from twinfeed.loaders.tools.verify import verify as verify
from twinfeed.samplers.batch import BatchSampler as BatchSampler
from twinfeed.samplers.diagnostics import diagnose as diagnose
from twinfeed.samplers.exact_once import ExactOnceBatchSampler as ExactOnceBatchSampler
from twinfeed.samplers.mixture import MixtureSampler as MixtureSampler
from twinfeed.samplers.orders import RandomSampler as RandomSampler
from twinfeed.samplers.orders import SequentialSampler as SequentialSampler
from twinfeed.samplers.pk import PKBatchSampler as PKBatchSampler
from twinfeed.samplers.reuse import ReuseSampler as ReuseSampler
from twinfeed.samplers.shard_shuffle import ShardShuffleSampler as ShardShuffleSampler
from twinfeed.samplers.subset import SubsetSampler as SubsetSampler
from twinfeed.samplers.subset import split as split
from twinfeed.samplers.views import ViewSampler as ViewSampler
from twinfeed.samplers.weighted import WeightedSampler as WeightedSampler

__version__: str
