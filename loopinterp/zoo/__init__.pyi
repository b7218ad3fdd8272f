from .pretrained import Card as Card
from .pretrained import get_card as get_card
from .pretrained import list_names as list_names
from .pretrained import list_pretrained as list_pretrained
from .pretrained import load_pretrained as load_pretrained
from .pretrained import make_entry as make_entry
from .pretrained import pretrained_run as pretrained_run
