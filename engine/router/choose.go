package router

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"strings"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvport/kvport/engine/router/policy"
	"github.com/kvport/kvport/internal/register"
)

// Replica is a group of instances. A prompt that a prefill instance of a group computes goes to a decode instance of
// the same group.
type Replica struct {
	Name    string
	Prefill []string // base URLs or DNS names; none: its decode instances serve alone
	Decode  []string // likewise
}

// instances lists those of a config. Errors name the flag and the URL that is wrong.
func (c *Config) instances() (all named, err error) {
	groups := map[string]string{} // by place
	add := func(flag, group string, r role, urls []string) {
		for _, text := range urls {
			place, problem := all.add(Instance{URL: text, Role: r.String(), Group: group})
			before, twice := groups[place]
			switch {
			case problem != nil:
			case twice && before != group:
				problem = fmt.Errorf("%q appears in two replicas", text)
			case twice:
				problem = fmt.Errorf("%q appears twice", text)
			}
			if problem != nil && err == nil {
				err = fmt.Errorf("--%s: %w", flag, problem)
			}
			groups[place] = group
		}
	}
	add("prefill", "", prefill, c.Prefill)
	add("decode", "", decode, c.Decode)
	names := map[string]bool{}
	for _, r := range c.Replicas {
		switch {
		case err != nil:
			return named{}, err
		case !register.IsGroup(r.Name):
			return named{}, fmt.Errorf("--replica: %q is not a name, %s", r.Name, register.WantGroup)
		case names[r.Name]:
			return named{}, fmt.Errorf("--replica: the name %q appears twice", r.Name)
		case len(r.Decode) == 0:
			return named{}, fmt.Errorf("--replica: %s has no decode instance", r.Name)
		}
		names[r.Name] = true
		add("replica", r.Name, prefill, r.Prefill)
		add("replica", r.Name, decode, r.Decode)
	}
	if n := len(all.specs); err == nil && n > maxInstances {
		err = fmt.Errorf("%w: %d, want at most %d", ErrTooMany, n, maxInstances)
	}
	return all, err
}

// sessionKey says where a request has the key of its session.
type sessionKey struct{ kind, name string }

// CheckSessionKey says what is wrong with the place of a session's key, after the name of the setting that has it.
func CheckSessionKey(s string) error {
	_, err := parseSessionKey(s)
	return err
}

// parseSessionKey reads header:NAME, cookie:NAME or field:NAME.
func parseSessionKey(s string) (sessionKey, error) {
	kind, name, _ := strings.Cut(s, ":")
	if kind != "header" && kind != "cookie" && kind != "field" || name == "" || strings.ContainsAny(name, " \t\r\n\"") {
		return sessionKey{}, fmt.Errorf("is %q, want header:NAME, cookie:NAME or field:NAME, such as header:X-Session-Id", s)
	}
	return sessionKey{kind, name}, nil
}

// of is the key of a request; empty if it has none.
func (k sessionKey) of(req *http.Request, body fields) string {
	switch k.kind {
	case "header":
		return req.Header.Get(k.name)
	case "cookie":
		if c, err := req.Cookie(k.name); err == nil {
			return c.Value
		}
	case "field":
		if v := body[k.name]; string(v) != "null" && string(v) != `""` {
			return string(v)
		}
	}
	return ""
}

// routeHeader asks for the reasons of a choice, in a request, and has them, in its answer.
const routeHeader = "X-Kvport-Route"

// holder says what instances hold of a request's prompt by their own word, such as their KV events. For instances that it
// does not list, the history decides. It keeps to a short limit of its own.
type holder interface {
	held(ctx context.Context, c *call) []policy.Held
}

// prepare says what the choice of instances for a request depends on.
func (c *call) prepare(ctx context.Context) *policy.Request {
	r := c.router
	q := &policy.Request{Session: c.session, Alone: c.method != "" || c.body.several(), Explain: c.explain || r.config.Log.Enabled(ctx, slog.LevelDebug)}
	q.Client = xxh3.HashStringSeed(c.client+"\n"+c.header.Get("Authorization"), r.seed)
	if c.method != "" {
		q.NoWork = true
		return q
	}
	q.Tokens = c.size / 4 // about
	if q.Alone || !r.pool.usesPrompts() {
		return q
	}
	q.Whole = !c.streams()
	q.Tokens = c.body.tokenIDs()
	scope, beginning := c.body.beginning()
	q.Prompt = policy.NewPrompt(r.seed, c.within(scope), beginning)
	q.Prompt.Client = xxh3.HashStringSeed(c.client, r.seed)
	for _, h := range r.holders {
		q.Held = append(q.Held, h.held(ctx, c)...)
	}
	if c.tokens > 0 {
		q.Tokens = c.tokens
	}
	if len(beginning) >= worthAsking {
		c.askAround(ctx, q)
	}
	return q
}

// beginning is the prompt as the policy tells it from others: messages or prompt as JSON without spaces and without
// what closes them, so that the next turn begins with it. scope is what else makes prompts differ.
func (f fields) beginning() (scope, text []byte) {
	text = f["messages"]
	if len(text) == 0 {
		text = f["prompt"]
	}
	return f.scope(), bytes.TrimRight(withoutSpaces(text), `"]`)
}

// scope is what makes prompts of the same text differ.
func (f fields) scope() (scope []byte) {
	for _, name := range []string{"model", "cache_salt", "tools"} {
		scope = append(append(scope, f[name]...), 0)
	}
	return scope
}

// withoutSpaces is valid JSON without the spaces between its parts.
func withoutSpaces(value []byte) []byte {
	short := make([]byte, 0, len(value))
	for len(value) > 0 {
		quote := bytes.IndexByte(value, '"')
		if quote < 0 {
			quote = len(value)
		}
		for _, c := range value[:quote] {
			if c > ' ' {
				short = append(short, c)
			}
		}
		end := quote + lengthOfText(value[quote:])
		short, value = append(short, value[quote:end]...), value[end:]
	}
	return short
}

// lengthOfText is the length of the JSON string at the beginning of a value, quotes included.
func lengthOfText(value []byte) int {
	for i := 1; i < len(value); {
		next := bytes.IndexByte(value[i:], '"')
		if next < 0 {
			break
		}
		i += next
		slashes := 0
		for value[i-1-slashes] == '\\' {
			slashes++
		}
		if i++; slashes%2 == 0 {
			return i
		}
	}
	return len(value)
}

// tokenIDs is how many tokens the prompt has; 0 if it is text.
func (f fields) tokenIDs() int {
	list := bytes.TrimSpace(f["prompt"])
	if len(list) < 2 || list[0] != '[' {
		return 0
	}
	if first := bytes.TrimSpace(list[1:])[0]; first < '0' || first > '9' {
		return 0
	}
	return 1 + bytes.Count(list, []byte(","))
}

// route is the choice for one attempt at a request.
type route struct {
	prefill, decode target // without a prefill instance its leg is nil
	without         string // why there is none; empty: none is needed
	policy, why     string
}

// choose picks the instances of the next attempt. With a ticket only a decode instance is needed, unless none fits the
// prefill instance that gave it: then the ticket is dropped.
func (c *call) choose(ctx context.Context, params *json.RawMessage) (at route, ok bool) {
	pool := c.router.pool
	if *params != nil {
		at, ok = pool.choose(c.request, c.failed, c.from)
	}
	if !ok {
		if at, ok = pool.choose(c.request, c.failed, policy.None); !ok {
			return route{}, false
		}
		*params, c.pair = nil, ""
	}
	if c.request.Alone { // an attempt before this one may have been given none
		at.without = c.without
	}
	c.picked = append(c.picked, at.decode.index)
	if at.prefill.leg != nil {
		c.picked = append(c.picked, at.prefill.index)
	}
	c.tell(ctx, &at)
	return at, true
}

// tell gives the reasons of a choice to a client that asks for them, and to the log.
func (c *call) tell(ctx context.Context, at *route) {
	if c.explain {
		shared := c.foreign() || c.router.config.SharedKeys != nil && c.router.config.SharedKeys()
		c.w.Header().Set(routeHeader, at.text(!shared))
	}
	if c.router.config.Log.Enabled(ctx, slog.LevelDebug) {
		attrs := []any{"id", c.id, "decode", at.decode.url.String()}
		if at.prefill.leg != nil {
			attrs = append(attrs, "prefill", at.prefill.url.String())
		}
		c.router.config.Log.Debug("instances chosen", append(attrs, "without", at.without, "why", at.why)...)
	}
}

// withdrawRoute takes routeHeader out of an answer by which an instance refuses a client, if it is the instances that ask for keys: the
// client may have none.
func (c *call) withdrawRoute(status int) {
	if status >= http.StatusBadRequest && c.router.config.passesKeys() {
		c.w.Header().Del(routeHeader)
	}
}

// text is the value of routeHeader, with the reasons or without them.
func (at *route) text(reasons bool) string {
	parts := []string{"policy=" + at.policy}
	if at.prefill.leg != nil {
		parts = append(parts, "prefill="+at.prefill.url.String())
	}
	parts = append(parts, "decode="+at.decode.url.String())
	if at.without != "" {
		parts = append(parts, "without="+at.without)
	}
	if reasons {
		parts = append(parts, "why="+strings.ReplaceAll(at.why, ";", ","))
	}
	return strings.Join(parts, "; ")
}

// choose picks the instances for an attempt and adds them to tried. from is the place of the prefill instance that has
// computed the prompt already, or None.
func (p *pool) choose(r *policy.Request, tried map[int]bool, from int) (at route, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.filter(r, tried)
	var c policy.Choice
	if from == policy.None {
		c, ok = p.policy.Choose(r)
	} else {
		c, ok = p.policy.ChooseDecode(r, from)
	}
	if !ok {
		return route{}, false
	}
	at = route{decode: p.take(c.Decode, r, tried), without: c.Without, policy: p.policy.Name(), why: c.Why}
	if c.Prefill != nil {
		at.prefill = p.take(c.Prefill, r, tried)
	}
	return at, true
}

// chooseFor picks another prefill instance for a decode instance and adds it to tried. why has the reasons, or why there is
// none.
func (p *pool) chooseFor(d target, r *policy.Request, tried map[int]bool) (t target, why string, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.filter(r, tried)
	c := p.policy.ChoosePrefill(r, d.leg)
	if c.Prefill == nil {
		return target{}, c.Without, false
	}
	return p.take(c.Prefill, r, tried), c.Why, true
}

// filter says which instances may be had now. The caller holds mu, also while the policy chooses.
func (p *pool) filter(r *policy.Request, tried map[int]bool) {
	now := p.now()
	r.Standing = func(i int) policy.Standing {
		standing := p.table.standing(i)
		switch {
		case tried[i] || !p.known[i].admits(now, r.Client):
			return policy.Out
		case standing < policy.Out && kindOf(r).counts() && p.isFull(i):
			return policy.Full
		}
		return standing
	}
	r.Fits = nil
	if len(p.misfits) > 0 {
		r.Fits = func(a, b int) bool { return p.misfits[pair{a, b}] == "" }
	}
}

// take makes the target of a leg. Its place is kept until leave gives it back. The caller holds mu.
func (p *pool) take(l *policy.Leg, r *policy.Request, tried map[int]bool) target {
	i, now, k := l.Place, p.now(), &p.known[l.Place]
	tried[i] = true
	if k.busy.picked(now, r.Client, k.load.running(), l) {
		p.wakeAfter(maxBusy)
	}
	p.begins(i, kindOf(r))
	k.breaker.picked()
	return target{
		index: i, role: p.table.instances[i].role, url: p.urls[i], life: p.lives[i].ctx, leg: l, kind: kindOf(r), client: r.Client,
		picked: now, stopped: new(bool),
	}
}

// sent takes note that a request goes to the instance.
func (p *pool) sent(t target) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known[t.index].busy.sent(t.client, t.leg)
	p.policy.Sent(t.leg, p.now())
}

// usesPrompts reports whether choices depend on the text of prompts.
func (p *pool) usesPrompts() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.policy.UsesPrompts()
}

// use lets instances be chosen as another config says.
func (p *pool) use(c policy.Config) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if c.Policy == p.chosenBy.Policy && maps.Equal(c.Weights, p.chosenBy.Weights) {
		return nil
	}
	if err := p.policy.Use(c); err != nil {
		return err
	}
	p.chosenBy = c
	p.log.Info("instances are chosen by another policy from now on", "policy", c.Policy, "weights", c.Weights)
	return nil
}

// unaided takes note that the decode instance gets no ticket.
func (p *pool) unaided(t target) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.policy.Unaided(t.leg)
}

// answered takes note of the first byte of a stream or of a whole answer, and of what the instance says about the
// prompt. Whole answers of decode instances say nothing about the time to the first byte.
func (p *pool) answered(t target, body []byte, timely bool) { p.heard(t, usage(body), timely) }

// heard is answered with what the answer says about its prompt.
func (p *pool) heard(t target, u policy.Usage, timely bool) {
	var now time.Time
	if timely {
		now = p.now()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if u.Prompt > 0 && t.leg.Computes() {
		for kind, n := range map[string]int{"prompt": u.Prompt, "expected": t.leg.Hit.Tokens(), "cached": u.Cached} {
			p.metrics.prefix.WithLabelValues(kind).Add(float64(n))
		}
	}
	p.policy.Answered(t.leg, now, u)
}

// done takes note that the instance has nothing to do with the request any more.
func (p *pool) done(t target) {
	p.mu.Lock()
	p.policy.Done(t.leg)
	k := &p.known[t.index]
	k.busy.over(t.client, t.leg)
	if p.stops(t) {
		k.load.ended = p.now()
	}
	p.wake()
	p.mu.Unlock()
	if t.role == prefill { // that of a decode instance is told when the request ends
		p.changed()
	}
}

// usage is what an answer says about its prompt.
func usage(answer []byte) policy.Usage {
	var a struct {
		Usage struct {
			Prompt  int `json:"prompt_tokens"`
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	}
	if len(answer) == 0 || json.Unmarshal(answer, &a) != nil {
		return policy.Usage{}
	}
	u := policy.Usage{Prompt: a.Usage.Prompt, Cached: a.Usage.Details.Cached}
	if u.Prompt < 0 || u.Prompt > maxTokens || u.Cached < 0 || u.Cached > u.Prompt { // nobody is believed
		return policy.Usage{}
	}
	return u
}

// maxTokens is how many tokens a prompt may have, for an instance to be believed.
const maxTokens = 16 << 20
