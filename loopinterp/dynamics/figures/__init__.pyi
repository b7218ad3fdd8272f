from .attention import attention_figures as attention_figures
from .convergence import convergence_figures as convergence_figures
from .extrapolation import extrapolation_figures as extrapolation_figures
