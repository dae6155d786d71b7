-- Shared head: rate limits, and queueing of jobs that waited elsewhere.
-- At most `concurrency` jobs with one key are in rq:rl:<key>:allowed, from when they are queued until they end. The
-- other jobs with this key wait in rq:rl:<key>:rate_limited, with that status and in no queue.
local function let_in(key, now_iso)
  local limit = 'rq:rl:' .. key
  local concurrency = tonumber(call('HGET', limit, 'concurrency') or '') or 0
  while call('ZCARD', limit .. ':allowed') < concurrency do
    local first = call('ZPOPMIN', limit .. ':rate_limited')
    local id, since = first[1], first[2]
    if not id then return end
    local job = 'rq:job:' .. id
    local is_job, fields = tried(call, 'HMGET', job, 'origin', 'status', 'enqueue_at_front')
    local queue, status, at_front = unpack(fields or {})
    if is_job and queue and status == 'rate_limited' then
      call('ZADD', limit .. ':allowed', since, id)
      call('HSET', job, 'status', 'queued', 'enqueued_at', now_iso)
      call(at_front == '1' and 'LPUSH' or 'RPUSH', 'rq:queue:' .. queue, id)
    end
  end
end

-- Put a job on its queue. A job with a rate limit waits for a slot first. at_front: whether it goes to the front.
local function enqueue(queue, id, at_front, now_iso, now_ts)
  local job = 'rq:job:' .. id
  local ttl, key, concurrency = unpack(call('HMGET', job, 'ttl', 'rate_limit_key', 'rate_limit_concurrency'))
  call('SADD', 'rq:queues', 'rq:queue:' .. queue)
  expire_in_queue(job, ttl)
  if key and concurrency then
    call('SADD', 'rq:rl-keys', key)
    call('HSET', 'rq:rl:' .. key, 'concurrency', concurrency)
    call('HSET', job, 'status', 'rate_limited', 'origin', queue)
    if at_front then call('HSET', job, 'enqueue_at_front', 1) end
    call('ZADD', 'rq:rl:' .. key .. ':rate_limited', now_ts, id)
    let_in(key, now_iso)
  else
    call('HSET', job, 'status', 'queued', 'enqueued_at', now_iso, 'origin', queue)
    call(at_front and 'LPUSH' or 'RPUSH', 'rq:queue:' .. queue, id)
  end
end

local function free_slot(key, id, now_iso)
  call('ZREM', 'rq:rl:' .. key .. ':allowed', id)
  let_in(key, now_iso)
end
