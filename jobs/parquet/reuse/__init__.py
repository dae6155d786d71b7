"""Takes answers of earlier runs. A key that says what a row asks finds the row's answer again."""
