from . import benchmark as benchmark
from . import circuits as circuits
from . import dynamics as dynamics
from . import lenses as lenses
from . import models as models
from . import plotting as plotting
from . import probing as probing
from . import rasp as rasp
from . import report as report
from . import tasks as tasks
from . import training as training
from . import workflow as workflow
from . import zoo as zoo
from .circuits import compare_programs as compare_programs
from .models import LoopedTransformer as LoopedTransformer
from .models import LoopedTransformerConfig as LoopedTransformerConfig
from .models_in_memory import analyze_model as analyze_model
from .rasp import compile_program as compile_program
from .rasp import get_program as get_program
from .studied_model import load as load
from .tasks import get_task as get_task
from .training import Run as Run
from .training import evaluate as evaluate
from .training import train as train
from .zoo import list_pretrained as list_pretrained
from .zoo import load_pretrained as load_pretrained

__version__: str
