// Takes images: chosen, dropped, pasted, or one of the server's sample scenes.

import { getBlob, getSamples } from "../lib/api.js";
import { byId, h } from "../lib/dom.js";
import { plain } from "../lib/format.js";

const TYPES = {
  png: "image/png",
  jpg: "image/jpeg",
  jpeg: "image/jpeg",
  webp: "image/webp",
  bmp: "image/bmp",
  tif: "image/tiff",
  tiff: "image/tiff",
};

/** `onImage({blob, type, name})` for every image; `onProblem(text)` for what is not one. */
export function setUpInput(onImage, onProblem) {
  const take = (file) => {
    const type = file.type || TYPES[file.name?.split(".").pop().toLowerCase()];
    if (!type?.startsWith("image/")) {
      onProblem(`${file.name || "This"} is not an image`, "PNG, JPEG, WebP, BMP and TIFF are read.");
      return;
    }
    unmarkSamples();
    onImage({ blob: file, type, name: file.name || "pasted image" });
  };

  const input = byId("file-input");
  input.addEventListener("change", () => {
    if (input.files.length) take(input.files[0]);
    input.value = ""; // so that the same file can be chosen again
  });

  addEventListener("paste", (event) => {
    const file = [...(event.clipboardData?.files ?? [])].find((candidate) => candidate.type.startsWith("image/"));
    if (!file) return; // text pasted into a field
    event.preventDefault();
    take(file);
  });

  setUpDrop(take);
}

/** The whole page takes a drop: beside the drop zone, the browser would open the file instead. */
function setUpDrop(take) {
  const zone = byId("drop-zone");
  let depth = 0; // enter and leave fire for every element passed over
  const hasFile = (event) => event.dataTransfer?.types.includes("Files");
  const mark = (change) => {
    depth = Math.max(0, depth + change);
    zone.classList.toggle("is-target", depth > 0);
  };
  addEventListener("dragenter", (event) => hasFile(event) && mark(1));
  addEventListener("dragleave", (event) => hasFile(event) && mark(-1));
  addEventListener("dragover", (event) => hasFile(event) && event.preventDefault());
  addEventListener("drop", (event) => {
    if (!hasFile(event)) return;
    event.preventDefault();
    depth = 0;
    mark(0);
    if (event.dataTransfer.files.length) take(event.dataTransfer.files[0]);
  });
}

/** Buttons with thumbnails; none when the server has no samples. */
export async function loadSamples(onImage, onError) {
  const list = byId("sample-list");
  const samples = await getSamples().catch(() => []);
  list.replaceChildren(...samples.map((sample) => sampleButton(sample, onImage, onError)));
  byId("samples").hidden = samples.length === 0;
}

function sampleButton({ name, url }, onImage, onError) {
  const picture = h("img", { alt: "", width: 96, height: 72 });
  const loaded = getBlob(url).then((blob) => {
    picture.src = URL.createObjectURL(blob);
    return blob;
  });
  loaded.catch(() => picture.remove()); // the name alone is still a button
  const choose = async (event) => {
    const button = event.currentTarget;
    try {
      const blob = await loaded;
      unmarkSamples();
      button.setAttribute("aria-pressed", "true");
      onImage({ blob, type: blob.type || "image/png", name });
    } catch (error) {
      onError(error);
    }
  };
  return h(
    "button",
    { type: "button", class: "sample", "aria-pressed": "false", "data-testid": `sample-${name}`, onclick: choose },
    picture,
    h("span", {}, plain(name)),
  );
}

function unmarkSamples() {
  for (const button of byId("sample-list").querySelectorAll("button")) button.setAttribute("aria-pressed", "false");
}
