"""Makes a page of the site of each notebook, as it was last run (hooks of mkdocs)."""

from typing import Any

from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter


def on_files(files: Files, config: Any) -> None:
    """Beside each notebook, its page and its pictures; the page's links are checked like all."""
    for notebook in [f for f in files if f.src_uri.endswith(".ipynb")]:
        name = notebook.src_uri.removesuffix(".ipynb")
        parts = {"unique_key": name.split("/")[-1], "output_files_dir": "pictures"}
        page, made = MarkdownExporter().from_filename(notebook.abs_src_path, resources=parts)
        folder = name.rpartition("/")[0]
        made = {f"{folder}/{path}": picture for path, picture in made["outputs"].items()}
        for path, content in {f"{name}.md": page, **made}.items():
            files.append(File.generated(config, path, content=content))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Where a page links to a notebook, the site has its page."""
    return markdown.replace(".ipynb)", ".md)")
