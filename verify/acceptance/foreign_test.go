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

// leg is one of the two requests that a router makes of a client's.
type leg string

const (
	prefillLeg leg = "prefill"
	decodeLeg  leg = "decode"
)

// foreign is what somebody else's router does between a client, a prefill and a decode engine. docs/router.md has the sources.
type foreign struct {
	name    string
	picker  string                         // the header where an endpoint picker names the prefill engine; empty: the router knows it
	passes  bool                           // the client's headers go on to the engines; else it has its own
	prefill func(f fields, chat bool)      // makes the prefill engine's request of the client's
	decode  func(f, answer fields)         // makes the decode engine's, once the prefill engine has answered; answer is empty if the router does not read it
	id      func(p, d string) string       // X-Request-Id of both; nil: it sets none
	blind   bool                           // it does not read the prefill engine's answer
	noChats bool                           // it has no path for them
	goesOn  bool                           // it asks the decode engine also if the prefill engine refuses, and answers nothing if that one refuses
	loads   bool                           // the decode engine gets blocks of the prefill engine
	alter   func(leg, http.Header, fields) // changes a request before it goes out: what is planted; may be nil
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
	delete(f, "min_tokens")
}

// capped is oneToken as llm-d's sidecar has it: chats have two names for the most tokens, and completions one.
func capped(f fields, chat bool) {
	if oneToken(f); chat {
		f["max_completion_tokens"] = 1
	}
}

func uuid(string, string) string {
	return fmt.Sprintf("%08x-%04x-4000-8000-%012x", rand.Uint32(), rand.Uint32()>>16, rand.Uint64()>>16)
}

// passOn gives the decode engine what the prefill engine has answered.
func passOn(f, answer fields) { f["kv_transfer_params"] = answer["kv_transfer_params"] }

// aibrix is AIBrix's gateway with one of its ways to hand over.
func aibrix(name string) *foreign {
	return &foreign{name: name, passes: true, id: uuid, prefill: func(f fields, _ bool) {
		oneToken(f)
		f["max_completion_tokens"] = 1
	}}
}

// shfs is AIBrix's default.
func shfs() *foreign {
	x := aibrix("AIBrix, shfs")
	prefill := x.prefill
	x.loads, x.prefill = true, func(f fields, chat bool) {
		prefill(f, chat)
		f["kv_transfer_params"] = noRemote()
	}
	x.decode = func(f, answer fields) {
		if params, ok := answer["kv_transfer_params"].(fields); ok {
			params["remote_host"] = "10.1.2.3"
			f["kv_transfer_params"] = params
		}
	}
	return x
}

// toyProxy is vLLM's proxy for NIXL.
func toyProxy() *foreign {
	return &foreign{
		name: "vLLM's proxy for NIXL", id: uuid, loads: true,
		prefill: func(f fields, _ bool) {
			oneToken(f)
			delete(f, "min_completion_tokens")
			if _, has := f["max_completion_tokens"]; has {
				f["max_completion_tokens"] = 1
			}
			f["kv_transfer_params"] = noRemote()
		},
		decode: func(f, answer fields) {
			if params, _ := answer["kv_transfer_params"].(fields); len(params) > 0 {
				f["kv_transfer_params"] = params
			}
		},
	}
}

// ncclProxy is vLLM's proxy for P2P NCCL. Its ids name the addresses at which engines take blocks.
func ncclProxy() *foreign {
	return &foreign{
		name: "vLLM's proxy for P2P NCCL", blind: true, noChats: true, goesOn: true, decode: func(fields, fields) {},
		prefill: func(f fields, _ bool) { f["max_tokens"] = 1 },
		id: func(p, d string) string {
			return fmt.Sprintf("___prefill_addr_%s___decode_addr_%s_%s", p, d, strings.ReplaceAll(uuid("", ""), "-", ""))
		},
	}
}

// sidecar is llm-d's for shared storage.
func sidecar() *foreign {
	return &foreign{
		name: "llm-d sidecar, shared-storage", picker: "x-prefiller-host-port", passes: true, blind: true,
		prefill: func(f fields, chat bool) {
			capped(f, chat)
			f["cache_hit_threshold"] = 0
		},
		decode: func(f, _ fields) { f["cache_hit_threshold"] = 0 },
	}
}

// foreigners are the routers that hand over by kv_transfer_params, or mean to.
func foreigners() map[string]*foreign {
	nixl := aibrix("AIBrix, nixl")
	nixl.decode = func(f, answer fields) { f["disagg_prefill_resp"] = answer }
	list := []*foreign{
		{
			name: "llm-d sidecar, nixlv2", picker: "x-prefiller-host-port", passes: true, id: uuid, loads: true, decode: passOn,
			prefill: func(f fields, chat bool) {
				capped(f, chat)
				f["kv_transfer_params"] = noRemote()
			},
		},
		shfs(), nixl, toyProxy(), ncclProxy(),
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
	answer func(fields) error // looks at what the prefill engine answers to a router that reads it; nil: nobody does
}

// start gives its URL. An endpoint picker in front of it names the prefill engine where the real one does.
func (x *replica) start(t *testing.T) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if x.picker != "" {
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
	p, id := x.p, ""
	if x.id != nil {
		id = x.id(x.p, x.d)
	}
	if x.picker != "" {
		p = r.Header.Get(x.picker)
	}
	if p != "" {
		done, err := x.first(w, r, p, id, asked)
		if err != nil || done {
			return err
		}
	}
	resp, err := x.post(decodeLeg, r, x.d, id, asked)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if x.goesOn && resp.StatusCode != http.StatusOK {
		return nil
	}
	w.WriteHeader(resp.StatusCode)
	_, err = io.Copy(w, resp.Body)
	return err
}

// first asks the prefill engine and makes the decode engine's request of the client's. It is done where the client gets the
// prefill engine's refusal.
func (x *replica) first(w http.ResponseWriter, r *http.Request, p, id string, asked fields) (done bool, err error) {
	request := maps.Clone(asked)
	x.prefill(request, strings.Contains(r.URL.Path, "/chat/"))
	resp, err := x.post(prefillLeg, r, p, id, request)
	if err != nil {
		return false, err
	}
	text, err := io.ReadAll(resp.Body)
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		return false, err
	}
	if resp.StatusCode != http.StatusOK && !x.goesOn {
		w.WriteHeader(resp.StatusCode)
		_, err = w.Write(text)
		return true, err
	}
	var answer fields
	if !x.blind {
		if err := json.Unmarshal(text, &answer); err != nil {
			return false, fmt.Errorf("the prefill engine's answer: %w", err)
		}
		if x.answer != nil {
			if err := x.answer(answer); err != nil {
				return false, err
			}
		}
	}
	x.decode(asked, answer)
	return false, nil
}

func (x *replica) post(to leg, r *http.Request, address, id string, f fields) (*http.Response, error) {
	h := http.Header{"Content-Type": {"application/json"}, "Authorization": {"Bearer None"}} // as Python writes a key that is not there
	if x.passes {
		h = http.Header{"Content-Type": r.Header["Content-Type"], "Authorization": r.Header["Authorization"]}
	}
	if id != "" {
		h.Set("X-Request-Id", id)
	}
	if x.alter != nil {
		x.alter(to, h, f)
	}
	data, err := json.Marshal(f)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(r.Context(), http.MethodPost, "http://"+address+r.URL.Path, bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	req.Header = h
	return x.client.Do(req)
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
	// What is not fetched is held for a while, so the prefill engine has room for that.
	c.p = c.ServeModel("sim", "prefill", config("kv_producer"), "--num-blocks", "20000")
	c.d = c.ServeModel("sim", "decode", config("kv_consumer"), "--enable-prefix-caching=false")
	return c
}

// counts are the tokens that the prefill engine has generated, and the prompt tokens that the decode engine has loaded.
func (c *contract) counts() (generated, loaded float64) {
	c.Helper()
	return c.Metrics(c.p).Sum("kvport_generated_tokens_total"), c.Metrics(c.d).Sum("kvport_prompt_tokens_total", `source="external"`)
}

// replica is a router in front of the engines.
func (c *contract) replica(f *foreign) *replica {
	return &replica{foreign: f, p: strings.TrimPrefix(c.p.URL, "http://"), d: strings.TrimPrefix(c.d.URL, "http://"), answer: handsOver(f)}
}

// handsOver checks that the prefill engine's answer says what those of vLLM say, if the router has asked for a handover.
func handsOver(f *foreign) func(fields) error {
	if !f.loads {
		return nil
	}
	return func(answer fields) error {
		for name, want := range (fields{"do_remote_prefill": true, "do_remote_decode": false}) {
			if p := paramsOf(answer); p[name] != want {
				return fmt.Errorf("the prefill engine's answer has %s %v", name, p[name])
			}
		}
		return nil
	}
}

// paramsOf are the kv_transfer_params of a request or an answer.
func paramsOf(r fields) fields {
	params, _ := r["kv_transfer_params"].(fields)
	return params
}

// known are prompts whose answers of a single node are known.
type known struct {
	completions, chats []string
	want               []*cluster.Completion
	texts              []string
}

// known asks a single node what a router then has to answer: two completions and a chat, where it has a path for chats.
func (c *contract) known(f *foreign) *known {
	c.Helper()
	c.asked++
	k := &known{completions: rig.Texts(c.T, *rig.Seed+9000+c.asked, 3, 400, 700)}
	if !f.noChats {
		k.completions, k.chats = k.completions[:2], k.completions[2:]
	}
	k.want = c.All(c.single.URL, k.completions, 3)
	for _, content := range k.chats {
		text, _, err := c.chat(c.single.URL, content)
		require.NoError(c, err)
		k.texts = append(k.texts, text)
	}
	return k
}

// ask compares a router's answers with those that are known, and counts the tokens of the prompts.
func (c *contract) ask(url string, k *known) (tokens int, err error) {
	for i, prompt := range k.completions {
		got, err := c.Client.Complete(c.Context(), url, cluster.Request{Prompt: prompt, MaxTokens: c.Tokens, IgnoreEOS: true, Salt: "of a tenant"})
		switch {
		case err != nil:
			return 0, err
		case !got.Equal(k.want[i]):
			return 0, fmt.Errorf("prompt %d has other tokens", i)
		case got.Prompt == 0:
			return 0, fmt.Errorf("prompt %d has no usage", i)
		}
		tokens += got.Prompt
	}
	for i, content := range k.chats {
		text, n, err := c.chat(url, content)
		switch {
		case err != nil:
			return 0, err
		case text != k.texts[i]:
			return 0, fmt.Errorf("chat %d has another text", i)
		}
		tokens += n
	}
	return tokens, nil
}

// measure says which part of the contract a router breaks: tokens are those of a single node, each prompt costs the prefill engine one token, and the decode
// engine loads what it computed.
func (c *contract) measure(f *foreign, url string, k *known) error {
	c.Helper()
	generated, loaded := c.counts()
	tokens, err := c.ask(url, k)
	if err != nil {
		return err
	}
	generatedAfter, loadedAfter := c.counts()
	c.Logf("%s: %d tokens in prompts, %.0f loaded, %.0f generated by the prefill engine", f.name, tokens, loadedAfter-loaded, generatedAfter-generated)
	if n, want := int(generatedAfter-generated), len(k.completions)+len(k.chats); n != want {
		return fmt.Errorf("the prefill engine generated %d tokens for %d prompts", n, want)
	}
	if n := loadedAfter - loaded; n < 0.8*float64(tokens) {
		return fmt.Errorf("the decode engine loaded %.0f of %d tokens", n, tokens)
	}
	return nil
}

// check measures prompts that nobody has asked before.
func (c *contract) check(f *foreign) error {
	c.Helper()
	k := c.known(f)
	return c.measure(f, c.replica(f).start(c.T), k)
}

// mostTries is how often a contract is tried.
const mostTries = 20

// holds requires that the contract is kept, and says how many tries that took. On a busy machine a transfer may miss one of its time limits, and
// the decode engine computes: then other prompts are tried.
func (c *contract) holds(router func() *foreign, check func(*foreign) error) (tries int) {
	c.Helper()
	for tries = 1; ; tries++ {
		f := router()
		err := check(f)
		if err == nil {
			return tries
		}
		if tries == mostTries || !strings.HasPrefix(err.Error(), loadsLess) {
			require.NoError(c, err, f.name)
		}
		c.Logf("%s, try %d: %v", f.name, tries, err)
	}
}

// stored measures prompts that were asked once, and whose blocks are stored by then.
func (c *contract) stored(f *foreign) error {
	c.Helper()
	k, url := c.known(f), c.replica(f).start(c.T)
	if _, err := c.ask(url, k); err != nil {
		return err
	}
	c.Idle(c.p)
	return c.measure(f, url, k)
}

// chat sends a chat that is not streamed, and gives its text and the tokens of its prompt.
func (c *contract) chat(url, content string) (text string, tokens int, err error) {
	data, err := json.Marshal(fields{
		"messages": []fields{{"role": "user", "content": content}}, "max_tokens": 12, "max_completion_tokens": 12, "temperature": 0, "ignore_eos": true,
	})
	if err != nil {
		return "", 0, err
	}
	req, err := http.NewRequestWithContext(c.Context(), http.MethodPost, url+"/v1/chat/completions", bytes.NewReader(data))
	if err != nil {
		return "", 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", 0, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", 0, err
	}
	var answer struct {
		Choices []struct{ Message struct{ Content string } }
		Usage   struct {
			Prompt int `json:"prompt_tokens"`
		}
	}
	if resp.StatusCode != http.StatusOK || json.Unmarshal(body, &answer) != nil || len(answer.Choices) != 1 {
		return "", 0, fmt.Errorf("a chat is answered with %s: %s", resp.Status, bytes.TrimSpace(body))
	}
	return answer.Choices[0].Message.Content, answer.Usage.Prompt, nil
}

// TestForeignRouters: our engines behind replicas of other people's routers. A wrong token never comes; blocks go from engine to engine wherever the
// router passes kv_transfer_params on as they are.
func TestForeignRouters(t *testing.T) {
	for _, f := range rig.Movers(t) {
		t.Run(f.Connector, func(t *testing.T) {
			c := newContract(t, func(role string) string {
				return fmt.Sprintf(`{"kv_connector":%q,"kv_role":%q,"kv_connector_extra_config":%s}`, f.Connector, role, f.Setups[0].Config)
			})
			for _, name := range slices.Sorted(maps.Keys(foreigners())) {
				router := func() *foreign { return foreigners()[name] }
				if !router().loads {
					require.ErrorContains(t, c.check(router()), "the decode engine loaded 0 of", name)
					continue
				}
				c.holds(router, c.check)
				c.planted(router, c.check, append(read(), handedOver()...))
				c.plantedIgnored(router, c.check)
			}
		})
	}
}

// TestForeignSharedStorage: llm-d's sidecar for shared storage passes nothing on. Both engines get the request with a cache_hit_threshold of 0, and find blocks
// by their keys. A save may end after the answer, so that the first request may find some of them missing; what was saved is loaded by the next one.
func TestForeignSharedStorage(t *testing.T) {
	r := rig.New(t)
	c := newContract(t, func(role string) string { return r.Config(role, "", "") })
	prompts := rig.Texts(t, *rig.Seed+9900, 3, 400, 700)
	want := c.All(c.single.URL, prompts, 3)
	x := c.replica(sidecar())
	url := x.start(t)
	rig.Same(t, "first", want, c.All(url, prompts, 1))
	rig.Same(t, "again", want, c.All(url, prompts, 1))

	// An engine that knew the threshold would answer with cache_threshold instead of computing.
	asked := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/completions", nil)
	asked.Header.Set("Content-Type", "application/json")
	resp, err := x.post(decodeLeg, asked, x.d, "threshold", fields{"prompt": "nobody has asked this before", "max_tokens": 3, "ignore_eos": true, "cache_hit_threshold": 0.9})
	require.NoError(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Contains(t, string(text), `"finish_reason":"length"`)

	c.holds(sidecar, c.stored)
	c.planted(sidecar, c.stored, read())
	c.plantedIgnored(sidecar, c.stored)
}
