from .direct_paths import path_patching as path_patching
from .unrolled_graph import UnrolledGraph as UnrolledGraph
