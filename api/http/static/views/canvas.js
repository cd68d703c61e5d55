// The picture: image canvas below, mask canvas above, both at most MAX_SIDE pixels long.

import { byId } from "../lib/dom.js";
import { decodeIndexPng } from "../lib/png.js";

const MAX_SIDE = 1600; // more than a screen shows; a 50-megapixel mask must not become a 200 MB canvas
const DIMMED = 0.12; // opacity of the other classes while one is highlighted
const UNKNOWN = [127, 127, 127]; // an index the palette does not have

export class Picture {
  constructor() {
    this.layers = byId("layers");
    this.imageCanvas = byId("image-canvas");
    this.maskCanvas = byId("mask-canvas");
    this.view = "overlay";
    this.opacity = 0.6;
    this.highlighted = null;
    this.mask = null;
    this.fused = null; // {answer, indices}: the mask that others are compared with
    this.compared = null; // its indices while another one is shown
    this.marksDifferences = false;
    this.palette = [];
  }

  /** Show the image itself. False when the browser cannot decode it (TIFF), though the server may. */
  async setImage(blob) {
    this.blob = blob;
    this.mask = null;
    this.#clear(this.maskCanvas);
    let bitmap;
    try {
      bitmap = await createImageBitmap(blob);
    } catch {
      this.bitmap = null;
      this.#clear(this.imageCanvas);
      return false;
    }
    if (blob !== this.blob) return true; // another image was chosen while this one was decoded
    this.bitmap = bitmap;
    this.#drawImage(bitmap, bitmap.width, bitmap.height);
    return true;
  }

  /** Show an answer's mask. Returns the share of pixels that differ from the last mask of this image, or null. */
  async setMask(answer) {
    const blob = this.blob;
    const mask = await decodeIndexPng(answer.mask, MAX_SIDE);
    if (blob !== this.blob) return null; // this mask belongs to an image that is gone
    const before = this.mask;
    this.mask = mask;
    this.compared = null;
    await this.#fitImage(answer.width, answer.height);
    this.maskCanvas.width = mask.width;
    this.maskCanvas.height = mask.height;
    this.paint();
    return before && before.indices.length === mask.indices.length ? changed(before.indices, mask.indices) : null;
  }

  /** Compare the mask with that of another answer; the share of pixels that differ, null where sizes do. */
  async compareWith(answer) {
    if (this.fused?.answer !== answer) {
      this.fused = { answer, indices: (await decodeIndexPng(answer.mask, MAX_SIDE)).indices };
    }
    if (this.mask?.indices.length !== this.fused.indices.length) return null;
    this.compared = this.fused.indices;
    if (this.marksDifferences) this.paint();
    return changed(this.compared, this.mask.indices);
  }

  /** Keep only what differs from the mask of `compareWith` in colour, or all of it. */
  markDifferences(on) {
    this.marksDifferences = on;
    this.paint();
  }

  setView(view) {
    this.view = view;
    this.layers.dataset.view = view;
    this.#fitFrame();
    this.paint();
  }

  setOpacity(opacity) {
    this.opacity = opacity;
    this.paint();
  }

  highlight(id) {
    if (this.highlighted === id) return;
    this.highlighted = id;
    this.paint();
  }

  /** Class under a mouse or touch event, or null. */
  classAt(event) {
    if (!this.mask) return null;
    const box = event.target.getBoundingClientRect();
    const x = Math.floor(((event.clientX - box.left) / box.width) * this.mask.width);
    const y = Math.floor(((event.clientY - box.top) / box.height) * this.mask.height);
    return this.mask.indices[y * this.mask.width + x] ?? null;
  }

  /** Colour every mask pixel. Alpha goes into the pixels, so that outlines can stay opaque over a faint fill. */
  paint() {
    if (!this.mask) return;
    const { indices, width, height } = this.mask;
    const overlay = this.view === "overlay";
    const colours = this.#colours(overlay ? this.opacity : 1);
    const outlines = this.#colours(overlay ? Math.min(1, this.opacity * 1.6) : 1);
    const same = this.marksDifferences ? this.compared : null;
    const faint = this.#colours((overlay ? this.opacity : 1) * DIMMED);
    const strong = this.#colours(overlay ? Math.max(this.opacity, 0.85) : 1);
    const pixels = new ImageData(width, height);
    const out = new Uint32Array(pixels.data.buffer);
    for (let i = 0; i < indices.length; i++) {
      const id = indices[i];
      const edge = (i + 1 < indices.length && indices[i + 1] !== id) || (indices[i + width] ?? id) !== id;
      if (same) out[i] = same[i] === id ? faint[id] : strong[id];
      else out[i] = edge ? outlines[id] : colours[id];
    }
    this.maskCanvas.getContext("2d").putImageData(pixels, 0, 0);
  }

  /** RGBA of all 256 indices as little-endian words, which is what every browser's ImageData is made of. */
  #colours(opacity) {
    return Uint32Array.from({ length: 256 }, (_, id) => {
      const [r, g, b] = this.palette[id] ?? UNKNOWN;
      const shown = this.highlighted === null || this.highlighted === id;
      const alpha = Math.round(
        255 * (shown ? Math.max(opacity, this.highlighted === id ? 0.75 : 0) : opacity * DIMMED),
      );
      return ((alpha << 24) | (b << 16) | (g << 8) | r) >>> 0;
    });
  }

  /** Show the image as the server saw it: browsers turn photographs by their EXIF tag, the server may not have. */
  async #fitImage(width, height) {
    if (!this.bitmap) {
      this.#size(width, height);
      return;
    }
    if (this.bitmap.width !== width && this.bitmap.width === height) {
      this.bitmap = await createImageBitmap(this.blob, { imageOrientation: "none" });
      this.#drawImage(this.bitmap, width, height);
    }
  }

  #drawImage(bitmap, width, height) {
    this.#size(width, height);
    const context = this.imageCanvas.getContext("2d");
    context.imageSmoothingQuality = "high";
    context.drawImage(bitmap, 0, 0, this.imageCanvas.width, this.imageCanvas.height);
  }

  #size(width, height) {
    const scale = Math.min(1, MAX_SIDE / Math.max(width, height));
    this.imageCanvas.width = Math.max(1, Math.round(width * scale));
    this.imageCanvas.height = Math.max(1, Math.round(height * scale));
    this.aspect = width / height;
    this.#fitFrame();
  }

  #fitFrame() {
    if (!this.aspect) return;
    const aspect = this.view === "split" ? 2 * this.aspect : this.aspect;
    this.layers.style.aspectRatio = String(aspect);
    this.layers.style.setProperty("--aspect", String(aspect));
  }

  #clear(canvas) {
    canvas.getContext("2d").clearRect(0, 0, canvas.width, canvas.height);
  }
}

function changed(before, after) {
  let different = 0;
  for (let i = 0; i < after.length; i++) different += before[i] !== after[i];
  return different / after.length;
}
