from .attention import AttentionResult as AttentionResult
from .attention import attention_study as attention_study
