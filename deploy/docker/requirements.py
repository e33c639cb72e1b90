"""Print what the project needs, with the named extras, to have it installed before the project is there."""

import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = [line for extra in sys.argv[1:] for line in project["optional-dependencies"][extra]]
print(*project["dependencies"], *extras, sep="\n")
