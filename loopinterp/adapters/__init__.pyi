from .adapt import adapt as adapt
from .exit_gates import ExitGate as ExitGate
from .huginn import HuginnAdapter as HuginnAdapter
from .ouro import OuroAdapter as OuroAdapter
from .published_model import PublishedConfig as PublishedConfig
from .published_model import PublishedModel as PublishedModel
