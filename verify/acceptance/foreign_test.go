package acceptance

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
)

// fields is a request or an answer as other people's routers handle it.
type fields = map[string]any

// foreign is what somebody else's router does between a client, a prefill and a decode engine. docs/router.md has the sources.
type foreign struct {
	name    string
	header  string                   // where an endpoint picker names the prefill engine; empty: the router knows it
	prefill func(f fields)           // makes the prefill engine's request of the client's
	decode  func(f, answer fields)   // makes the decode engine's, once the prefill engine has answered; answer is empty if the router does not read it
	id      func(p, d string) string // X-Request-Id of both
	blind   bool                     // it does not read the prefill engine's answer
	loads   bool                     // the decode engine gets blocks of the prefill engine
}

// noRemote are the parameters with which vLLM's proxies ask a prefill engine for a handover.
func noRemote() fields {
	return fields{
		"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": nil, "remote_block_ids": nil, "remote_host": nil, "remote_port": nil,
	}
}

// oneToken makes a request that computes the prompt and little else.
func oneToken(f fields) {
	f["max_tokens"], f["stream"] = 1, false
	delete(f, "stream_options")
}

func uuid(string, string) string {
	return fmt.Sprintf("%08x-%04x-4000-8000-%012x", rand.Uint32(), rand.Uint32()>>16, rand.Uint64()>>16)
}

// passOn gives the decode engine what the prefill engine has answered.
func passOn(f, answer fields) { f["kv_transfer_params"] = answer["kv_transfer_params"] }

// foreigners are the routers that hand over by kv_transfer_params, or mean to.
func foreigners() map[string]*foreign {
	list := []*foreign{
		{
			name: "llm-d sidecar, nixlv2", header: "x-prefiller-host-port", id: uuid, loads: true, decode: passOn,
			prefill: func(f fields) {
				oneToken(f)
				f["max_completion_tokens"], f["kv_transfer_params"] = 1, noRemote()
				delete(f, "min_tokens")
			},
		},
		{
			name: "AIBrix, shfs", id: uuid, loads: true,
			prefill: func(f fields) {
				oneToken(f)
				f["max_completion_tokens"], f["kv_transfer_params"] = 1, noRemote()
				delete(f, "min_tokens")
			},
			decode: func(f, answer fields) {
				if params, ok := answer["kv_transfer_params"].(fields); ok {
					params["remote_host"] = "10.1.2.3"
					f["kv_transfer_params"] = params
				}
			},
		},
		{
			name: "AIBrix, nixl", id: uuid,
			prefill: func(f fields) { oneToken(f); f["max_completion_tokens"] = 1 },
			decode:  func(f, answer fields) { f["disagg_prefill_resp"] = answer },
		},
		{
			name: "vLLM's proxy for NIXL", id: uuid, loads: true, decode: passOn,
			prefill: func(f fields) { oneToken(f); f["kv_transfer_params"] = noRemote() },
		},
		{
			name: "vLLM's proxy for P2P NCCL", blind: true, decode: func(fields, fields) {},
			prefill: func(f fields) { f["max_tokens"] = 1 },
			id: func(p, d string) string {
				return fmt.Sprintf("___prefill_addr_%s___decode_addr_%s_%s", p, d, strings.ReplaceAll(uuid("", ""), "-", ""))
			},
		},
	}
	out := map[string]*foreign{}
	for _, f := range list {
		out[f.name] = f
	}
	return out
}

// replica is a foreign router at work.
type replica struct {
	*foreign
	p, d   string // host:port
	client http.Client
}

// start gives its URL. An endpoint picker in front of it names the prefill engine where the real one does.
func (x *replica) start(t *testing.T) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if x.header != "" {
			r.Header.Set("x-prefiller-host-port", x.p)
		}
		if err := x.serve(w, r); err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
		}
	}))
	t.Cleanup(func() {
		x.client.CloseIdleConnections()
		s.Close()
	})
	return s.URL
}

func (x *replica) serve(w http.ResponseWriter, r *http.Request) error {
	var asked fields
	if err := json.NewDecoder(r.Body).Decode(&asked); err != nil {
		return err
	}
	p, id := x.p, x.id(x.p, x.d)
	if x.header != "" {
		p = r.Header.Get(x.header)
	}
	if p != "" {
		request := maps.Clone(asked)
		x.prefill(request)
		resp, err := x.post(r, p, id, request)
		if err != nil {
			return err
		}
		text, err := io.ReadAll(resp.Body)
		if err := errors.Join(err, resp.Body.Close()); err != nil {
			return err
		}
		if resp.StatusCode != http.StatusOK {
			w.WriteHeader(resp.StatusCode)
			_, err = w.Write(text)
			return err
		}
		var answer fields
		if !x.blind {
			if err := json.Unmarshal(text, &answer); err != nil {
				return fmt.Errorf("the prefill engine's answer: %w", err)
			}
		}
		x.decode(asked, answer)
	}
	resp, err := x.post(r, x.d, id, asked)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	w.WriteHeader(resp.StatusCode)
	_, err = io.Copy(w, resp.Body)
	return err
}

func (x *replica) post(r *http.Request, to, id string, f fields) (*http.Response, error) {
	data, err := json.Marshal(f)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(r.Context(), http.MethodPost, "http://"+to+r.URL.Path, bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer None") // as Python writes a key that is not there
	req.Header.Set("X-Request-Id", id)
	return x.client.Do(req)
}

// paramsOf are the kv_transfer_params of a request.
func paramsOf(r fields) fields {
	params, _ := r["kv_transfer_params"].(fields)
	return params
}

// contract is a prefill and a decode engine behind other people's routers.
type contract struct {
	*rig.Rig
	single, p, d *cluster.Process
	asked        uint64
}

func newContract(t *testing.T, config func(role string) string) *contract {
	t.Helper()
	c := &contract{Rig: rig.New(t)}
	c.single = c.ServeModel("sim", "single", "")
	c.p, c.d = c.ServeModel("sim", "prefill", config("kv_producer")), c.ServeModel("sim", "decode", config("kv_consumer"), "--enable-prefix-caching=false")
	return c
}

// counts are the tokens that the prefill engine has generated, and the prompt tokens that the decode engine has loaded.
func (c *contract) counts() (generated, loaded float64) {
	c.Helper()
	return c.Metrics(c.p).Sum("kvport_generated_tokens_total"), c.Metrics(c.d).Sum("kvport_prompt_tokens_total", `source="external"`)
}

// check says which part of the contract a router breaks: tokens are those of a single node, each prompt costs the prefill engine one token, and the decode
// engine loads what it computed.
func (c *contract) check(f *foreign) error {
	c.Helper()
	c.asked++
	prompts := rig.Texts(c.T, *rig.Seed+9000+c.asked, 3, 400, 700)
	want := c.All(c.single.URL, prompts, 3)
	generated, loaded := c.counts()
	x := &replica{foreign: f, p: strings.TrimPrefix(c.p.URL, "http://"), d: strings.TrimPrefix(c.d.URL, "http://")}
	url := x.start(c.T)
	tokens := 0
	for i, prompt := range prompts {
		got, err := c.Complete(url, prompt)
		if err != nil {
			return err
		}
		if !got.Equal(want[i]) {
			return fmt.Errorf("prompt %d has other tokens", i)
		}
		tokens += got.Prompt
	}
	generatedAfter, loadedAfter := c.counts()
	c.Logf("%s: %d tokens in prompts, %.0f loaded, %.0f generated by the prefill engine", f.name, tokens, loadedAfter-loaded, generatedAfter-generated)
	if n := int(generatedAfter - generated); n != len(prompts) {
		return fmt.Errorf("the prefill engine generated %d tokens for %d prompts", n, len(prompts))
	}
	if n := loadedAfter - loaded; n < 0.8*float64(tokens) {
		return fmt.Errorf("the decode engine loaded %.0f of %d tokens", n, tokens)
	}
	return nil
}

// chat compares an answer to a chat, which no router streams here.
func (c *contract) chat(f *foreign) {
	c.Helper()
	x := &replica{foreign: f, p: strings.TrimPrefix(c.p.URL, "http://"), d: strings.TrimPrefix(c.d.URL, "http://")}
	var texts []string
	for _, url := range []string{c.single.URL, x.start(c.T)} {
		req, err := http.NewRequestWithContext(c.Context(), http.MethodPost, url+"/v1/chat/completions",
			strings.NewReader(`{"messages":[{"role":"user","content":"`+strings.Repeat("once upon a time ", 30)+`"}],"max_tokens":12,"temperature":0}`))
		require.NoError(c, err)
		req.Header.Set("Content-Type", "application/json")
		resp, err := x.client.Do(req)
		require.NoError(c, err)
		var answer struct {
			Choices []struct{ Message struct{ Content string } }
		}
		require.NoError(c, json.NewDecoder(resp.Body).Decode(&answer))
		require.NoError(c, resp.Body.Close())
		require.Equal(c, http.StatusOK, resp.StatusCode)
		require.Len(c, answer.Choices, 1)
		texts = append(texts, answer.Choices[0].Message.Content)
	}
	require.NotEmpty(c, texts[0])
	require.Equal(c, texts[0], texts[1], f.name)
}

// TestForeignRouters: our engines behind replicas of other people's routers. A wrong token never comes; blocks go from engine to engine wherever the
// router passes kv_transfer_params on as they are.
func TestForeignRouters(t *testing.T) {
	for _, f := range rig.Movers(t) {
		t.Run(f.Connector, func(t *testing.T) {
			c := newContract(t, func(role string) string {
				return fmt.Sprintf(`{"kv_connector":%q,"kv_role":%q,"kv_connector_extra_config":%s}`, f.Connector, role, f.Setups[0].Config)
			})
			routers := foreigners()
			for _, name := range slices.Sorted(maps.Keys(routers)) {
				router := routers[name]
				err := c.check(router)
				if router.loads {
					require.NoError(t, err, name)
				} else {
					require.ErrorContains(t, err, "the decode engine loaded 0 of", name)
				}
				c.chat(router)
			}
			c.planted(f.Connector)
		})
	}
}

// planted changes one header or field of a router at a time, and requires that the contract notices.
func (c *contract) planted(connector string) {
	c.Helper()
	before := func(field string, value any) func(*foreign) { // in kv_transfer_params for the prefill engine
		return func(f *foreign) {
			prefill := f.prefill
			f.prefill = func(r fields) { prefill(r); paramsOf(r)[field] = value }
		}
	}
	after := func(change func(params fields)) func(*foreign) { // in those of the decode engine
		return func(f *foreign) {
			decode := f.decode
			f.decode = func(r, answer fields) {
				decode(r, answer)
				change(paramsOf(r))
			}
		}
	}
	tests := map[string]struct {
		change func(*foreign)
		says   string
	}{
		"the header has another name": {func(f *foreign) { f.header = "x-prefill-host-port" }, "generated 0 tokens for 3 prompts"},
		"the prompt is not only computed": {func(f *foreign) {
			prefill := f.prefill
			f.prefill = func(r fields) { n := r["max_tokens"]; prefill(r); r["max_tokens"], r["max_completion_tokens"] = n, n }
		}, "the prefill engine generated "},
		"the prefill engine streams": {func(f *foreign) {
			prefill := f.prefill
			f.prefill = func(r fields) { prefill(r); r["stream"] = true }
		}, "the prefill engine's answer"},
		"no handover is asked for":    {before("do_remote_decode", false), "the decode engine loaded 0 of"},
		"a field that we do not know": {before("transfer_id", "tx1"), "kv_transfer_params.transfer_id"},
		"the answer is not passed on": {func(f *foreign) { f.decode = func(fields, fields) {} }, "the decode engine loaded 0 of"},
		"only fields that vLLM has":   {after(func(p fields) { delete(p, "kvport_ticket") }), "the decode engine loaded 0 of"},
		"the ticket is another":       {after(func(p fields) { p["kvport_ticket"] = "AAAA" }), "the decode engine loaded 0 of"},
		"the ticket is cut": {after(func(p fields) {
			ticket, _ := p["kvport_ticket"].(string)
			p["kvport_ticket"] = ticket[:max(0, len(ticket)-4)]
		}), "the decode engine loaded 0 of"},
		"a field has another type": {after(func(p fields) { p["do_remote_prefill"] = "yes" }), "kv_transfer_params.do_remote_prefill"},
	}
	for _, name := range slices.Sorted(maps.Keys(tests)) {
		test, router := tests[name], foreigners()["llm-d sidecar, nixlv2"]
		test.change(router)
		router.name = name
		require.ErrorContains(c, c.check(router), test.says, "%s: %s", connector, name)
	}
}

// TestForeignSharedStorage: llm-d's sidecar for shared storage passes nothing on. Both engines get the request with a cache_hit_threshold of 0, and find blocks
// by their keys. A save may end after the answer, so that the first request may find some of them missing; what was saved is loaded by the next one.
func TestForeignSharedStorage(t *testing.T) {
	r := rig.New(t)
	c := newContract(t, func(role string) string { return r.Config(role, "", "") })
	sidecar := &foreign{
		name: "llm-d sidecar, shared-storage", header: "x-prefiller-host-port", id: uuid, blind: true,
		prefill: func(f fields) {
			oneToken(f)
			f["max_completion_tokens"], f["cache_hit_threshold"] = 1, 0
		},
		decode: func(f, _ fields) { f["cache_hit_threshold"] = 0 },
	}
	prompts := rig.Texts(t, *rig.Seed+9900, 3, 400, 700)
	want := c.All(c.single.URL, prompts, 3)
	x := &replica{foreign: sidecar, p: strings.TrimPrefix(c.p.URL, "http://"), d: strings.TrimPrefix(c.d.URL, "http://")}
	url := x.start(t)
	rig.Same(t, "first", want, c.All(url, prompts, 1))
	c.Idle(c.p)
	_, before := c.counts()
	again := c.All(url, prompts, 1)
	rig.Same(t, "again", want, again)
	tokens := 0
	for _, a := range again {
		tokens += a.Prompt
	}
	_, loaded := c.counts()
	t.Logf("%d tokens in prompts, %.0f loaded", tokens, loaded-before)
	require.Greater(t, loaded-before, 0.8*float64(tokens))

	// An engine that knew the threshold would answer with cache_threshold instead of computing.
	resp, err := x.post(httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/completions", nil), x.d, "threshold",
		fields{"prompt": "nobody has asked this before", "max_tokens": 3, "ignore_eos": true, "cache_hit_threshold": 0.9})
	require.NoError(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Contains(t, string(text), `"finish_reason":"length"`)
}
