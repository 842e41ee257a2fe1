package router

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
)

// turnedAway takes note that a prefill instance refused a request. That is never the client's business: the
// decode instance serves it alone, and refuses it by itself if it is wrong. It reports whether another prefill
// instance may take it, since the reason lies with this one.
func (c *call) turnedAway(p target, got *answer) (another bool) {
	c.router.pool.worked(p) // it is alive
	code := errorCode(got.body)
	if plainlyWrong(got.status) && code != "context_length_exceeded" {
		c.router.config.Log.Debug("prefill instance calls a request invalid, decode judges it", "id", c.id,
			"instance", p.url.String(), "status", got.status, "code", code)
		return false
	}
	remedy := ""
	switch got.status {
	case http.StatusUnauthorized, http.StatusForbidden:
		another, remedy = true, c.router.config.keyRemedy()
	case http.StatusNotFound:
		another, remedy = true, "see whether its URL and the name of its model are those of the decode instances"
	}
	c.router.pool.refuses(p, got.status, code, remedy)
	return another
}

// plainlyWrong reports whether a status says that the request is invalid, as every instance would say.
func plainlyWrong(status int) bool {
	return status == http.StatusBadRequest || status == http.StatusUnprocessableEntity
}

// keyRemedy says what to do about an instance that asks for another API key.
func (c *Config) keyRemedy() string {
	switch {
	case c.UpstreamKey != "":
		return "it does not take the key of --upstream-api-key-file"
	case c.OwnKeys:
		return "it needs --upstream-api-key-file"
	}
	return "it needs --upstream-api-key-file, or the client's own key is wrong"
}

// errorCode is the code in an instance's error; empty if it has none. It is text, or a number as of vLLM.
func errorCode(body []byte) string {
	var e struct {
		Error struct {
			Code json.RawMessage `json:"code"`
		} `json:"error"`
	}
	if json.Unmarshal(body, &e) != nil || string(e.Error.Code) == "null" {
		return ""
	}
	code := strings.Trim(string(e.Error.Code), `"`)
	return strings.ToValidUTF8(code[:min(len(code), maxCode)], "")
}

// maxCode bounds the code of an instance's error, in bytes.
const maxCode = 64

// refuses takes note that an instance turns requests away. The log has each status once until the instance
// changes its state: clients must not be able to fill it.
func (p *pool) refuses(t target, status int, code, remedy string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := &p.known[t.index]
	k.refusal = fmt.Sprintf("it refused a request with HTTP %d", status)
	for _, more := range []string{code, remedy} {
		if more != "" {
			k.refusal += ": " + more
		}
	}
	if k.warned[status] {
		return
	}
	if k.warned == nil {
		k.warned = map[int]bool{}
	}
	k.warned[status] = true
	p.log.Warn("prefill instance refuses a request, decode serves alone if no other takes it", "instance", t.url.String(),
		"status", status, "code", code, "remedy", remedy)
}

// accepted takes note that a prefill instance did what a request asks for.
func (p *pool) accepted(t target) {
	p.worked(t)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known[t.index].refusal = ""
}
