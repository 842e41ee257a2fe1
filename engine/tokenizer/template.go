package tokenizer

import (
	"errors"
	"fmt"

	"github.com/nikolalohinski/gonja/v2"
	"github.com/nikolalohinski/gonja/v2/exec"
	"github.com/nikolalohinski/gonja/v2/loaders"
)

// template is a model's Jinja chat template.
type template struct {
	jinja    *exec.Template
	bos, eos string
}

// templateName is how the template is called in its own messages.
const templateName = "/chat_template"

// parseTemplate compiles a template. It can reach no file: the loader knows only the template itself.
func parseTemplate(source, bos, eos string) (*template, error) {
	loader, err := loaders.NewMemoryLoader(map[string]string{templateName: source})
	if err != nil {
		return nil, fmt.Errorf("chat template: %w", err)
	}
	jinja, err := exec.NewTemplate(templateName, gonja.DefaultConfig, loader, gonja.DefaultEnvironment)
	if err != nil {
		return nil, fmt.Errorf("chat template: %w", err)
	}
	return &template{jinja: jinja, bos: bos, eos: eos}, nil
}

func (t *template) render(messages []Message) (string, error) {
	list := make([]map[string]string, len(messages))
	for i, m := range messages {
		list[i] = map[string]string{"role": m.Role, "content": m.Content}
	}
	ctx := exec.EmptyContext()
	ctx.Set("messages", list)
	ctx.Set("add_generation_prompt", true)
	ctx.Set("bos_token", t.bos)
	ctx.Set("eos_token", t.eos)
	ctx.Set("raise_exception", func(message string) (string, error) { return "", errors.New(message) })
	text, err := t.jinja.ExecuteToString(ctx)
	if err != nil {
		return "", fmt.Errorf("chat template: %w", err)
	}
	return text, nil
}
