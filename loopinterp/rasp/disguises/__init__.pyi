from .disguise_check import DisguiseCheck as DisguiseCheck
from .disguise_check import check_disguise as check_disguise
from .distractors import distract as distract
from .noise import add_noise as add_noise
from .permutation import permute as permute
from .rotation import rotate as rotate
from .superposition import narrowest_superposition as narrowest_superposition
from .superposition import superpose as superpose
