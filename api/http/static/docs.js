// FastAPI's own docs page starts Swagger UI from an inline script, which our content security policy refuses.
SwaggerUIBundle({ url: "/openapi.json", dom_id: "#swagger-ui", deepLinking: true });
