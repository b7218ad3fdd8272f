from .attention_by_loop import AttentionResult as AttentionResult
from .attention_by_loop import attention_study as attention_study
from .worked_example import WorkedExample as WorkedExample
from .worked_example import worked_example as worked_example
