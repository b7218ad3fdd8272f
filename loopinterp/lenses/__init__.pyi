from .attention_by_loop import AttentionResult as AttentionResult
from .attention_by_loop import attention_study as attention_study
