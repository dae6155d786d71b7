-- Shared head: the rate limits of RQ 3, whose clients write these keys and whose workers free the slots.
-- Of the jobs with one key at most `concurrency` are in rq:rl:<key>:allowed, from when they are queued until they
-- end; the others wait in rq:rl:<key>:rate_limited, with that status and in no queue.
local function let_in(key, now_iso)
  local limit = 'rq:rl:' .. key
  local concurrency = tonumber(call('HGET', limit, 'concurrency') or '') or 0
  while call('ZCARD', limit .. ':allowed') < concurrency do
    local first = call('ZPOPMIN', limit .. ':rate_limited')
    local id, since = first[1], first[2]
    if not id then return end
    local job = 'rq:job:' .. id
    local fields = call('HMGET', job, 'origin', 'status', 'enqueue_at_front')
    if fields[1] and fields[2] == 'rate_limited' then
      call('ZADD', limit .. ':allowed', since, id)
      call('HSET', job, 'status', 'queued', 'enqueued_at', now_iso)
      call(fields[3] == '1' and 'LPUSH' or 'RPUSH', 'rq:queue:' .. fields[1], id)
    end
  end
end

local function free_slot(key, id, now_iso)
  call('ZREM', 'rq:rl:' .. key .. ':allowed', id)
  let_in(key, now_iso)
end
