from .direct_paths import path_patching as path_patching
from .edge_discovery import edge_study as edge_study
from .edge_recovery import edges_recovered as edges_recovered
from .edge_study_result import EdgeStudy as EdgeStudy
from .known_edges import as_circuit as as_circuit
from .known_edges import program_edges as program_edges
from .known_edges import wiping_edges as wiping_edges
from .unrolled_graph import UnrolledGraph as UnrolledGraph
