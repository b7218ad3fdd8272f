from . import circuits as circuits
from . import dynamics as dynamics
from . import ground_truth as ground_truth
from . import lenses as lenses
from . import models as models
from . import plotting as plotting
from . import probing as probing
from . import rasp as rasp
from . import report as report
from . import tasks as tasks
from . import training as training
from . import workflow as workflow

__version__: str
