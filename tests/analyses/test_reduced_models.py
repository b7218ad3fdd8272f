"""The page says what the file of reduced models says."""

from __future__ import annotations

import pandas as pd

from analyses import reduced_models
from analyses.tables_in_pages import PAGES, RESULTS, put


def test_the_page_says_what_the_file_says() -> None:
    stored = pd.read_csv(RESULTS / reduced_models.FILE)
    text = (PAGES / reduced_models.PAGE).read_text()
    assert put(text, {reduced_models.NAME: reduced_models.as_table(stored)}) == text
