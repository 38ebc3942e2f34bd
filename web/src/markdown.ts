import DOMPurify from "dompurify";
import { Marked } from "marked";

const marked = new Marked({ gfm: true, breaks: true });

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer");
  }
});

/** Markdown of a model as HTML without scripts, forms, styles, or anything that loads from elsewhere. */
export function html(text: string): string {
  const made = marked.parse(text, { async: false });
  return DOMPurify.sanitize(made, {
    FORBID_TAGS: ["style", "form", "input", "button", "textarea", "select", "img", "video", "audio", "source", "svg"],
    FORBID_ATTR: ["style", "class", "id", "name"],
    RETURN_TRUSTED_TYPE: true,
  }) as unknown as string;
}
