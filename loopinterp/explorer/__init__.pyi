from .exploration import Exploration as Exploration
from .exploration_study import explore as explore
from .notebook_widget import ExplorerWidget as ExplorerWidget
from .page_data import page_data as page_data
from .task_words import answer_words as answer_words
from .task_words import token_words as token_words
from .task_words import words_at as words_at
from .typed_example import typed_example as typed_example
