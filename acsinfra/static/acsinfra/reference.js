// The reference: Swagger UI over our own document, light or dark as the rest of the page.
"use strict";

function followTheme() {
  document.documentElement.classList.toggle("dark-mode", isDark());
}

const place = document.getElementById("reference");
SwaggerUIBundle({
  url: place.dataset.document,
  domNode: place,
  deepLinking: true,
  displayRequestDuration: true,
  defaultModelsExpandDepth: 0,
  defaultModelExpandDepth: 3,
  presets: [SwaggerUIBundle.presets.apis],
});
followTheme();
new MutationObserver(followTheme).observe(document.documentElement, { attributeFilter: ["data-theme"] });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", followTheme);
