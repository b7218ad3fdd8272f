from .near_miss_generator import near_misses as near_misses
from .near_miss_generator import near_misses_by_kind as near_misses_by_kind
from .program_equivalence import Equivalence as Equivalence
from .program_equivalence import equivalence as equivalence
