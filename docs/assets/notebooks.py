"""Turn each notebook, as last run, into a page of the site (mkdocs hooks)."""

from typing import Any

from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter


def on_files(files: Files, config: Any) -> None:
    """Add the page and pictures of each notebook, so that mkdocs checks their links too."""
    for notebook in [f for f in files if f.src_uri.endswith(".ipynb")]:
        name = notebook.src_uri.removesuffix(".ipynb")
        parts = {
            "unique_key": name.split("/")[-1],
            "output_files_dir": "pictures",
        }
        page, resources = MarkdownExporter().from_filename(
            notebook.abs_src_path, resources=parts
        )
        folder = name.rpartition("/")[0]
        pictures = {
            f"{folder}/{path}": data
            for path, data in resources["outputs"].items()
        }
        for path, content in {f"{name}.md": page, **pictures}.items():
            files.append(File.generated(config, path, content=content))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Link to the page of a notebook instead of the notebook."""
    return markdown.replace(".ipynb)", ".md)")
