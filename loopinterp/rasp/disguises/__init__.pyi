from .distractors import distract as distract
from .noise import add_noise as add_noise
from .permutation import permute as permute
from .rotation import rotate as rotate
from .superposition.narrowing import narrowest_superposition as narrowest_superposition
from .superposition.superposing import superpose as superpose
