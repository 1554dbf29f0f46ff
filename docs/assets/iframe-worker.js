/* Search on pages opened from a disk. A browser starts no Worker from file://, so the search script runs in a hidden frame.
   Material for MkDocs talks to what stands here as `Worker`; on a server the browser's own Worker stays. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow, script = inner.document.createElement("script");
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inner = new Promise((resolve) => { script.onload = () => resolve(inner); });
      script.src = url;
      inner.document.body.append(script);
    }
    postMessage(data) {
      this.inner.then((inner) => inner.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
  window.Worker = window.IFrameWorker;
}
