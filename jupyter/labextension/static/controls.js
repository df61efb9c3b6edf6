// What JupyterLab and ipywidgets leave out for a reader at the keyboard or with a screen reader.
// Plain JavaScript in the form that JupyterLab loads as a prebuilt extension: nothing is built.
(() => {
  const STYLE = `
    .jp-MarkdownCell .jp-RenderedMarkdown > :is(p, ul, ol, blockquote, details) { max-width: 50em; }
    .course-controls.jupyter-widgets-disconnected::after {
      content: "No kernel listens to these controls: run this cell again.";
      font-weight: bold;
    }`;

  // A key on a control is the control's. Without this, ArrowDown leaves a dropdown for the next
  // cell, and m makes a text cell of the code cell: the control is gone. JupyterLab looks for the
  // attribute on the focused element only. Keys with Ctrl, Alt or Cmd, and Shift + Enter, which
  // runs the cell, stay JupyterLab's.
  function keepKey(event) {
    if (!event.target.closest?.('.jupyter-widgets')) return;
    const labs =
      event.ctrlKey || event.altKey || event.metaKey || (event.shiftKey && event.key === 'Enter');
    event.target.toggleAttribute('data-lm-suppress-shortcuts', !labs);
  }

  // ipywidgets gives a slider's handle no name, and a group of radio buttons neither name nor role.
  function giveName(widget) {
    const label = widget.querySelector('.widget-label');
    const name = label?.textContent || label?.title;
    if (!name) return;
    const named = widget.querySelector('.noUi-handle') ?? widget.querySelector('.widget-radio-box');
    if (named?.matches('.widget-radio-box')) named.setAttribute('role', 'radiogroup');
    named?.setAttribute('aria-label', name);
  }

  function giveNames(records) {
    const unnamed = '.widget-slider, .widget-radio';
    for (const node of records.flatMap((record) => [...record.addedNodes]))
      if (node instanceof Element) {
        if (node.matches(unnamed)) giveName(node);
        node.querySelectorAll(unnamed).forEach(giveName);
      }
  }

  function activate() {
    document.head.append(Object.assign(document.createElement('style'), { textContent: STYLE }));
    window.addEventListener('keydown', keepKey, { capture: true }); // before JupyterLab sees it
    new MutationObserver(giveNames).observe(document.body, { childList: true, subtree: true });
  }

  const plugin = { id: 'training-measured:controls', autoStart: true, activate };
  (window._JUPYTERLAB ??= {})['training-measured'] = {
    init: () => {},
    get: () => Promise.resolve(() => ({ __esModule: true, default: plugin })),
  };
})();
